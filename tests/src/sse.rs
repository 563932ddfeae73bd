//! Server-sent events out of bytes that may be cut anywhere.

/// The data of the events of one stream, as they become whole.
#[derive(Debug, Default)]
pub struct Events {
    line: Vec<u8>,
    data: Vec<u8>,
}

impl Events {
    /// Takes the next bytes; returns the data of every event that they end.
    ///
    /// Lines end with LF or CRLF. An event that the stream leaves unfinished is never returned.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut events = Vec::new();
        for byte in bytes {
            if *byte != b'\n' {
                self.line.push(*byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let line = line.strip_suffix(b"\r").unwrap_or(&line);
            if !line.is_empty() {
                self.field(line);
            } else if !self.data.is_empty() {
                let data = std::mem::take(&mut self.data);
                events.push(String::from_utf8_lossy(&data).into_owned());
            }
        }
        events
    }

    fn field(&mut self, line: &[u8]) {
        let Some(value) = line.strip_prefix(b"data:") else { return };
        if !self.data.is_empty() {
            self.data.push(b'\n');
        }
        self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_gives_the_same_events() {
        let stream = "data: é\r\n\r\n: ping\n\ndata: a\ndata: b\nid: 7\n\ndata:[DONE]\n\ndata: cut";
        for cut in 0..=stream.len() {
            let (head, tail) = stream.as_bytes().split_at(cut);
            let mut events = Events::default();
            let all = [events.push(head), events.push(tail)].concat();
            assert_eq!(all, ["é", "a\nb", "[DONE]"], "cut at {cut}");
        }
    }
}
