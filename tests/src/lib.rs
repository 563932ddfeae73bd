//! Workspace tests, the demo and its load generator.
