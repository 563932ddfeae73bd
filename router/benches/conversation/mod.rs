//! The conversations that benchmarks have: a long one that grows by turns, and
//! short ones. Shared with the comparison of tokenizers.

use serde_json::{Value, json};

/// Bytes of text in the long conversation: about 119,000 tokens.
const LONG_BYTES: usize = 450_000;

/// A conversation of code and prose, in turns of about 2 KB.
pub(crate) struct Long {
    messages: Vec<Value>,
    lot: u64,
}

impl Long {
    /// Conversation `number` before its next turn. Others differ from their first
    /// words on.
    pub(crate) fn numbered(number: u64) -> Self {
        let system = format!("You are careful assistant {number}.");
        let mut long = Self {
            messages: vec![json!({"role": "system", "content": system})],
            lot: number.wrapping_add(7),
        };
        let mut bytes = 0;
        while bytes < LONG_BYTES {
            let before = long.messages.len();
            long.exchange();
            bytes += long.messages[before..]
                .iter()
                .filter_map(|message| message["content"].as_str())
                .map(str::len)
                .sum::<usize>();
        }
        long.messages.push(json!({"role": "user", "content": "And now?"}));
        long
    }

    /// The assistant answers and the user asks: about 500 tokens.
    pub(crate) fn turn(&mut self) {
        let (answer, question) = (self.text(1500), self.text(500));
        self.messages.push(json!({"role": "assistant", "content": answer}));
        self.messages.push(json!({"role": "user", "content": question}));
    }

    /// The request, as bytes.
    pub(crate) fn body(&self) -> Vec<u8> {
        serde_json::to_vec(&json!({"model": "m", "stream": true, "messages": self.messages})).expect("JSON")
    }

    fn exchange(&mut self) {
        let (question, answer) = (self.text(700), self.text(1800));
        self.messages.push(json!({"role": "user", "content": question}));
        self.messages.push(json!({"role": "assistant", "content": answer}));
    }

    fn text(&mut self, bytes: usize) -> String {
        text(&mut self.lot, bytes)
    }
}

/// Request number `number` of 2 KiB.
pub(crate) fn short(number: usize) -> Vec<u8> {
    let mut lot = number as u64;
    let system = text(&mut 3, 900);
    let question = text(&mut lot, 950);
    serde_json::to_vec(&json!({"model": "m", "messages": [
        {"role": "system", "content": system}, {"role": "user", "content": question}
    ]}))
    .expect("JSON")
}

fn text(lot: &mut u64, bytes: usize) -> String {
    const SCRAPS: [&str; 12] = [
        "The harbour master wrote a different letter every morning before the tide turned. ",
        "fn main() {\n    let total: u64 = items.iter().map(|item| item.price).sum();\n    println!(\"{total}\");\n}\n",
        "def handler(event, context):\n    return {\"statusCode\": 200, \"body\": json.dumps(event)}\n\n",
        "Please look at the log of the third worker: it says 10.4.17.229 refused 1,024 connections. ",
        "路由器把请求送到最便宜的工人那里。",
        "| name | value |\n|---|---|\n| alpha | 0.125 |\n| beta | 17 |\n",
        "Because of that the queue grows, and nobody knows why it does not shrink again.\n\n",
        "SELECT id, created_at FROM orders WHERE status = 'open' AND total > 99.5;\n",
        "- first, check whether the cache is warm;\n- then compare it with yesterday's numbers.\n",
        "The identifiers are 7f3a9c1e-55d2-4b0e-9a77-0c1d2e3f4a5b and e1b2c3d4. ",
        "It's what they'd have said, wouldn't they? \"Perhaps\", she answered. ",
        "Größe und Gewicht sind naïve Maße, café inklusive. ",
    ];
    let mut text = String::with_capacity(bytes + 100);
    while text.len() < bytes {
        *lot = lot.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let roll = (*lot >> 33) as usize;
        text.push_str(SCRAPS[roll % SCRAPS.len()]);
        text.push_str(&format!("{} ", roll % 9973));
    }
    text
}
