//! Everything that decides, and nothing that moves bytes.
