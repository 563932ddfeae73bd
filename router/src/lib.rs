//! The shell around the deciding core.
