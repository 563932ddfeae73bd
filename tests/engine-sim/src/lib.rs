//! A faithful stand-in for vLLM and SGLang.
