//! Our side: the code that serves requests, from bytes to block hashes.

use std::path::Path;

use kvrouter_core::blocks::{Identity, IdentitySeed};
use kvrouter_core::units::BlockSize;
use kvrouter_crds::config::Engine;
use kvrouter_router::prompt::body::Body;
use kvrouter_router::prompt::endpoint::{Content, Endpoint};
use kvrouter_router::prompt::tokenize::{Specials, Tokenizer};
use kvrouter_router::prompt::{Asked, Prompter};

/// What the prefix cache may hold.
const ROOM: usize = 256 << 20;

/// The prompt path of one router.
pub(crate) struct Ours {
    prompter: Prompter,
    tokenizer: Tokenizer,
    identity: Identity,
}

impl Ours {
    pub(crate) fn load(model: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            prompter: Prompter::load(model, ROOM, 1)?,
            tokenizer: Tokenizer::load(model)?,
            identity: Identity::new(IdentitySeed::new(b"")),
        })
    }

    /// Token ids of a request. Its blocks are hashed on the way.
    pub(crate) fn ids(&self, body: &[u8]) -> Vec<u32> {
        let asked = Asked {
            endpoint: Endpoint::Chat,
            engine: Engine::VLLM,
            adapter: None,
            identity: &self.identity,
            size: BlockSize::new(16).expect("not zero"),
            now_unix_ms: 0,
        };
        let mut prompt = self.prompter.prepare(&asked, self.read(body));
        assert_eq!(prompt.refused, None, "a plain chat is not refused");
        let part = prompt.parts.remove(0);
        assert_eq!(part.blocks.len(), part.tokens.len() / 16, "all full blocks are hashed");
        part.tokens
    }

    /// The text of a request.
    pub(crate) fn text(&self, body: &[u8]) -> String {
        let mut body = Body::parse(Endpoint::Chat, body).expect("JSON");
        let Ok(Content::Chat(chat)) = self.prompter.content(Endpoint::Chat, &mut body, Engine::VLLM) else {
            unreachable!("it is a chat")
        };
        self.prompter.render(*chat, Engine::VLLM, 0).expect("a plain chat renders").text
    }

    /// The tokenizer alone, on a whole text.
    pub(crate) fn encode(&self, text: &str) -> usize {
        self.tokenizer.encode(text, Specials::AsWritten).expect("text has tokens").len()
    }

    fn read(&self, body: &[u8]) -> Body {
        self.prompter.read(Endpoint::Chat, 0, body).expect("JSON")
    }
}
