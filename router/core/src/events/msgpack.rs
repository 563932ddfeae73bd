//! A bounded, borrowing MessagePack reader.
//!
//! It reads straight from the received bytes, allocates nothing by itself and
//! never trusts a length: a declared length is compared with what is left
//! before anybody reserves memory for it. Markers come from the `rmp` crate;
//! the authority is the MessagePack specification.

use rmp::Marker;

/// Deepest nesting that [`Reader::skip`] follows. Engines nest four deep.
pub const MAX_NESTING: u32 = 32;

/// Why bytes are not the MessagePack value that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The bytes end inside a value.
    #[error("message ends inside a value")]
    Truncated,
    /// Another type stands here.
    #[error("expected {expected}, found {found}")]
    Type {
        /// What was asked for.
        expected: &'static str,
        /// What stands there.
        found: &'static str,
    },
    /// An integer does not fit.
    #[error("integer {value} does not fit {expected}")]
    Range {
        /// The value as read.
        value: i128,
        /// The type it was meant for.
        expected: &'static str,
    },
    /// A string is not UTF-8.
    #[error("string is not UTF-8")]
    Utf8,
    /// Values are nested deeper than [`MAX_NESTING`].
    #[error("values are nested deeper than {MAX_NESTING}")]
    Nesting,
    /// A collection claims more elements than bytes are left.
    #[error("collection claims {claimed} elements in {left} bytes")]
    Length {
        /// Elements claimed.
        claimed: u64,
        /// Bytes left.
        left: usize,
    },
}

/// What kind of value comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `nil`.
    Nil,
    /// A boolean.
    Bool,
    /// Any integer.
    Int,
    /// A 32- or 64-bit float.
    Float,
    /// A string.
    Str,
    /// Bytes.
    Bin,
    /// An array.
    Array,
    /// A map.
    Map,
    /// An extension or a reserved marker.
    Other,
}

impl Kind {
    /// Name for error messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nil => "nil",
            Self::Bool => "bool",
            Self::Int => "integer",
            Self::Float => "float",
            Self::Str => "string",
            Self::Bin => "bytes",
            Self::Array => "array",
            Self::Map => "map",
            Self::Other => "extension",
        }
    }
}

/// A cursor over one message.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader at the start of `bytes`.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes }
    }

    /// Whether everything has been read.
    pub const fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// The kind of the next value, without reading it.
    pub fn peek(&self) -> Result<Kind, ReadError> {
        Ok(match self.marker()? {
            Marker::Null => Kind::Nil,
            Marker::True | Marker::False => Kind::Bool,
            Marker::FixPos(_) | Marker::FixNeg(_) => Kind::Int,
            Marker::U8 | Marker::U16 | Marker::U32 | Marker::U64 => Kind::Int,
            Marker::I8 | Marker::I16 | Marker::I32 | Marker::I64 => Kind::Int,
            Marker::F32 | Marker::F64 => Kind::Float,
            Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => Kind::Str,
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => Kind::Bin,
            Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => Kind::Array,
            Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => Kind::Map,
            _ => Kind::Other,
        })
    }

    /// Reads `nil` if it comes next.
    pub fn take_nil(&mut self) -> Result<bool, ReadError> {
        let nil = self.peek()? == Kind::Nil;
        if nil {
            self.advance(1)?;
        }
        Ok(nil)
    }

    /// Reads any integer.
    pub fn int(&mut self) -> Result<i128, ReadError> {
        let marker = self.marker()?;
        if self.peek()? != Kind::Int {
            return Err(self.unexpected("integer"));
        }
        self.advance(1)?;
        Ok(match marker {
            Marker::FixPos(value) => i128::from(value),
            Marker::FixNeg(value) => i128::from(value),
            Marker::U8 => i128::from(u8::from_be_bytes(self.array()?)),
            Marker::U16 => i128::from(u16::from_be_bytes(self.array()?)),
            Marker::U32 => i128::from(u32::from_be_bytes(self.array()?)),
            Marker::U64 => i128::from(u64::from_be_bytes(self.array()?)),
            Marker::I8 => i128::from(i8::from_be_bytes(self.array()?)),
            Marker::I16 => i128::from(i16::from_be_bytes(self.array()?)),
            Marker::I32 => i128::from(i32::from_be_bytes(self.array()?)),
            _ => i128::from(i64::from_be_bytes(self.array()?)),
        })
    }

    /// Reads an integer of 0 to 2^32 − 1.
    pub fn u32(&mut self) -> Result<u32, ReadError> {
        let value = self.int()?;
        u32::try_from(value).map_err(|_| ReadError::Range { value, expected: "u32" })
    }

    /// Reads an integer of 0 to 2^64 − 1.
    pub fn u64(&mut self) -> Result<u64, ReadError> {
        let value = self.int()?;
        u64::try_from(value).map_err(|_| ReadError::Range { value, expected: "u64" })
    }

    /// Reads a float; an integer counts as one.
    pub fn float(&mut self) -> Result<f64, ReadError> {
        match self.marker()? {
            Marker::F64 => {
                self.advance(1)?;
                Ok(f64::from_be_bytes(self.array()?))
            }
            Marker::F32 => {
                self.advance(1)?;
                Ok(f64::from(f32::from_be_bytes(self.array()?)))
            }
            _ => self.int().map(|value| value as f64),
        }
    }

    /// Reads a string.
    pub fn str(&mut self) -> Result<&'a str, ReadError> {
        let marker = self.marker()?;
        if self.peek()? != Kind::Str {
            return Err(self.unexpected("string"));
        }
        self.advance(1)?;
        let length = match marker {
            Marker::FixStr(length) => u32::from(length),
            Marker::Str8 => u32::from(u8::from_be_bytes(self.array()?)),
            Marker::Str16 => u32::from(u16::from_be_bytes(self.array()?)),
            _ => u32::from_be_bytes(self.array()?),
        };
        std::str::from_utf8(self.bytes(length as usize)?).map_err(|_| ReadError::Utf8)
    }

    /// Reads bytes.
    pub fn bin(&mut self) -> Result<&'a [u8], ReadError> {
        let marker = self.marker()?;
        if self.peek()? != Kind::Bin {
            return Err(self.unexpected("bytes"));
        }
        self.advance(1)?;
        let length = match marker {
            Marker::Bin8 => u32::from(u8::from_be_bytes(self.array()?)),
            Marker::Bin16 => u32::from(u16::from_be_bytes(self.array()?)),
            _ => u32::from_be_bytes(self.array()?),
        };
        self.bytes(length as usize)
    }

    /// Reads the head of an array and returns how many elements follow. Never
    /// more than bytes are left.
    pub fn array_len(&mut self) -> Result<usize, ReadError> {
        let marker = self.marker()?;
        if self.peek()? != Kind::Array {
            return Err(self.unexpected("array"));
        }
        self.advance(1)?;
        let length = match marker {
            Marker::FixArray(length) => u32::from(length),
            Marker::Array16 => u32::from(u16::from_be_bytes(self.array()?)),
            _ => u32::from_be_bytes(self.array()?),
        };
        self.plausible(u64::from(length), 1)
    }

    /// Reads the head of a map and returns how many pairs follow.
    pub fn map_len(&mut self) -> Result<usize, ReadError> {
        let marker = self.marker()?;
        if self.peek()? != Kind::Map {
            return Err(self.unexpected("map"));
        }
        self.advance(1)?;
        let pairs = match marker {
            Marker::FixMap(pairs) => u32::from(pairs),
            Marker::Map16 => u32::from(u16::from_be_bytes(self.array()?)),
            _ => u32::from_be_bytes(self.array()?),
        };
        self.plausible(u64::from(pairs), 2)
    }

    /// Reads and forgets one whole value. O(its size), without recursion into
    /// more than [`MAX_NESTING`] levels.
    pub fn skip(&mut self) -> Result<(), ReadError> {
        self.skip_nested(0)
    }

    fn skip_nested(&mut self, depth: u32) -> Result<(), ReadError> {
        if depth > MAX_NESTING {
            return Err(ReadError::Nesting);
        }
        match self.peek()? {
            Kind::Nil | Kind::Bool => self.advance(1),
            Kind::Int => self.int().map(drop),
            Kind::Float => self.float().map(drop),
            Kind::Str => self.skip_str(),
            Kind::Bin => self.bin().map(drop),
            Kind::Array => {
                let length = self.array_len()?;
                (0..length).try_for_each(|_| self.skip_nested(depth + 1))
            }
            Kind::Map => {
                let pairs = self.map_len()?;
                (0..2 * pairs).try_for_each(|_| self.skip_nested(depth + 1))
            }
            Kind::Other => self.skip_extension(),
        }
    }

    /// A string that nobody reads need not be UTF-8.
    fn skip_str(&mut self) -> Result<(), ReadError> {
        match self.str() {
            Ok(_) | Err(ReadError::Utf8) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn skip_extension(&mut self) -> Result<(), ReadError> {
        let marker = self.marker()?;
        self.advance(1)?;
        let length = match marker {
            Marker::FixExt1 => 1,
            Marker::FixExt2 => 2,
            Marker::FixExt4 => 4,
            Marker::FixExt8 => 8,
            Marker::FixExt16 => 16,
            Marker::Ext8 => usize::from(u8::from_be_bytes(self.array()?)),
            Marker::Ext16 => usize::from(u16::from_be_bytes(self.array()?)),
            Marker::Ext32 => u32::from_be_bytes(self.array()?) as usize,
            _ => return Err(ReadError::Type { expected: "a value", found: "reserved marker" }),
        };
        self.bytes(length.saturating_add(1)).map(drop)
    }

    fn marker(&self) -> Result<Marker, ReadError> {
        self.left.first().map(|byte| Marker::from_u8(*byte)).ok_or(ReadError::Truncated)
    }

    fn unexpected(&self, expected: &'static str) -> ReadError {
        ReadError::Type { expected, found: self.peek().map_or("nothing", Kind::name) }
    }

    fn advance(&mut self, count: usize) -> Result<(), ReadError> {
        self.bytes(count).map(drop)
    }

    fn bytes(&mut self, count: usize) -> Result<&'a [u8], ReadError> {
        let (head, rest) = self.left.split_at_checked(count).ok_or(ReadError::Truncated)?;
        self.left = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ReadError> {
        let (head, rest) = self.left.split_first_chunk::<N>().ok_or(ReadError::Truncated)?;
        self.left = rest;
        Ok(*head)
    }

    /// Every element takes at least `least` bytes, so a longer claim is a lie.
    fn plausible(&self, claimed: u64, least: u64) -> Result<usize, ReadError> {
        let left = self.left.len();
        if claimed.saturating_mul(least) > left as u64 {
            return Err(ReadError::Length { claimed, left });
        }
        Ok(claimed as usize)
    }
}

/// Takes note of what was written to a vector, which cannot fail; the encoder's
/// signature does not know.
pub(crate) fn infallible<T, E>(written: Result<T, E>) {
    debug_assert!(written.is_ok(), "a vector takes all bytes");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_that_lie_are_refused_before_memory_is_reserved() {
        let array_of_4_billion = [0xdd, 0xff, 0xff, 0xff, 0xff, 1];
        assert_eq!(
            Reader::new(&array_of_4_billion).array_len(),
            Err(ReadError::Length { claimed: u64::from(u32::MAX), left: 1 })
        );
        let nested = vec![0x91; 1_000_000];
        assert_eq!(Reader::new(&nested).skip(), Err(ReadError::Nesting));
    }

    #[test]
    fn integers_of_every_width_are_read_exactly() {
        for value in [0i64, 1, 127, 128, 255, 256, 65_535, 65_536, i64::MAX, -1, -32, -33, -129, i64::MIN] {
            let mut bytes = Vec::new();
            rmp::encode::write_sint(&mut bytes, value).expect("a vector takes all");
            assert_eq!(Reader::new(&bytes).int(), Ok(i128::from(value)));
        }
        let mut bytes = Vec::new();
        rmp::encode::write_u64(&mut bytes, u64::MAX).expect("a vector takes all");
        assert_eq!(Reader::new(&bytes).u64(), Ok(u64::MAX));
        assert!(matches!(Reader::new(&bytes).u32(), Err(ReadError::Range { .. })));
    }

    proptest! {
        #[test]
        fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut reader = Reader::new(&bytes);
            while !reader.is_empty() && reader.skip().is_ok() {}
        }
    }
}
