#!/usr/bin/env python3
"""Writes what vLLM and SGLang make of every case, by their own code.

    expect.py vllm MODELS     expected/NAME.vllm.json for every folder of MODELS and for the fixture
    expect.py sglang MODELS   the same for SGLang

Runs in an environment in which the engine can be imported; `make engines` installs both. No engine is started: the
classes that validate, convert and render a request are called, and transformers tokenises, as in the engine. An entry
is [count, digest] per prompt, the digest being the first 16 hex digits of SHA-256 over the ids as little-endian u32;
null where the engine refuses the request.
"""

import datetime
import hashlib
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import cases

HERE = Path(__file__).resolve().parent
FIXTURE = HERE.parent / "fixtures" / "tokenizer"
# The clock of templates that print the day.
TODAY = datetime.datetime(2026, 7, 26, 12, 0, 0)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return TODAY


def load(folder):
    from transformers import AutoTokenizer
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = Clock
    return AutoTokenizer.from_pretrained(folder)


def digest(ids):
    return [len(ids), hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()[:16]]


class Vllm:
    def __init__(self, tokenizer, template):
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

        self.tokenizer = tokenizer
        self.config = SimpleNamespace(
            multimodal_config=None, enable_prompt_embeds=False, tokenizer_revision=None, revision=None,
            code_revision=None, trust_remote_code=False, tokenizer="t", model="m", is_multimodal_model=False,
            hf_config=SimpleNamespace(model_type="none"), max_model_len=10_000_000,
        )
        self.merge = AnthropicServingMessages._detect_merge_inline_system(template)
        self.effort = None

    def ids(self, text, special):
        return self.tokenizer(text, add_special_tokens=special).input_ids

    def render(self, request, messages, tools):
        from vllm.renderers import hf
        from vllm.renderers.chat_utils import parse_chat_messages
        from vllm.renderers.params import merge_kwargs

        params = request.build_chat_params(None, "auto").with_defaults(merge_kwargs(None, dict(tools=tools, tokenize=False)))
        given = params.chat_template_kwargs.get("tools")
        form = hf.resolve_chat_template_content_format(None, given, "auto", self.tokenizer, model_config=self.config)
        conversation, _, _ = parse_chat_messages(messages, self.config, content_format=form)
        arguments = params.get_apply_chat_template_kwargs()
        return hf.safe_apply_chat_template(self.config, self.tokenizer, conversation, **arguments)

    def chat(self, request):
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        text = self.render(request, request.messages, tools)
        return [self.ids(text, request.add_special_tokens)]

    def without_thinking(self):
        """As AnthropicServingMessages._probe_disabled_thinking_effort asks."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        def probe(effort):
            try:
                return self.chat(ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort))
            except Exception:
                return None

        none = probe("none")
        if none is None or any(probe(effort) == none for effort in ["low", "medium", "high", "xhigh", "max"]):
            return "low"
        return "none"

    def prompts(self, endpoint, body):
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses import utils
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        if endpoint == "/v1/completions":
            request = CompletionRequest.model_validate(body)
            return plain(request.prompt, lambda text: self.ids(text, request.add_special_tokens))
        if endpoint == "/v1/messages":
            self.effort = self.effort or self.without_thinking()
            request = AnthropicMessagesRequest.model_validate(body)
            return self.chat(AnthropicServingMessages.to_chat_completion_request(
                request, merge_inline_system=self.merge, disabled_thinking_effort=self.effort))
        if endpoint == "/v1/responses":
            request = ResponsesRequest.model_validate(body)
            if request.previous_response_id:
                return None
            tools = utils.construct_tool_dicts(request.tools, request.tool_choice)
            messages = utils.construct_input_messages(request_instructions=request.instructions, request_input=request.input)
            return [self.ids(self.render(request, messages, tools), False)]
        return self.chat(ChatCompletionRequest.model_validate(body))


class Sglang:
    def __init__(self, tokenizer, template):
        from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
        from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
        from sglang.srt.parser import jinja_template_utils as templates
        from sglang.srt.parser.template_detection import detect_inline_system_support

        self.tokenizer = tokenizer
        chat = object.__new__(OpenAIServingChat)
        chat.__dict__.update(
            tokenizer_manager=SimpleNamespace(tokenizer=tokenizer, served_model_name="m"),
            template_manager=SimpleNamespace(
                chat_template_name=None, python_chat_template=None, reasoning_config=None,
                jinja_template_content_format=templates.detect_jinja_template_content_format(template or ""),
                jinja_template_may_reorder_tool_results=templates.jinja_template_may_reorder_tool_results(template),
                force_reasoning=False,
            ),
            tool_call_parser=None, reasoning_parser=None, default_chat_template_kwargs={}, _reasoning_detector=None,
            is_gpt_oss=False, is_gemma4=False, is_minimax_m3=False, chat_encoding_spec=None, _encoding_adapter=None,
            supports_inline_system=detect_inline_system_support(template),
            _tokenizer_auto_adds_specials=len(tokenizer.encode("")) > 0, _prompt_text_round_trip_is_lossy=False,
            _template_reads_reasoning_content=False,
        )
        self.serving = chat
        self.anthropic = AnthropicServing(chat)
        self.responses = object.__new__(OpenAIServingResponses)
        self.responses.__dict__.update(chat.__dict__)

    def chat(self, request):
        return [list(self.serving._process_messages(request, False).prompt_ids)]

    def prompts(self, endpoint, body):
        from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest

        if endpoint == "/v1/completions":
            return plain(CompletionRequest.model_validate(body).prompt, lambda text: self.tokenizer(text).input_ids)
        if endpoint == "/v1/messages":
            request = AnthropicMessagesRequest.model_validate(body)
            return self.chat(self.anthropic._convert_to_chat_completion_request(request))
        if endpoint == "/v1/responses":
            request = ResponsesRequest.model_validate(body)
            if request.previous_response_id:
                return None
            tools = self.responses._response_tools_to_chat_tools(request)
            choice = self.responses._chat_tool_choice(request.effective_tool_choice()) if tools else "none"
            return self.chat(ChatCompletionRequest(
                model="m", messages=self.responses._construct_input_messages(request), tools=tools or None,
                tool_choice=choice, reasoning_effort=request.reasoning.effort if request.reasoning else None,
                chat_template_kwargs=request.chat_template_kwargs))
        return self.chat(ChatCompletionRequest.model_validate(body))


def plain(prompt, encode):
    if isinstance(prompt, str):
        return [encode(prompt)]
    if not prompt:
        return None
    if isinstance(prompt[0], str):
        return [encode(text) for text in prompt]
    return [list(prompt)] if isinstance(prompt[0], int) else [list(ids) for ids in prompt]


def main():
    engine = {"vllm": Vllm, "sglang": Sglang}[sys.argv[1]]
    folders = {folder.name: folder for folder in sorted(Path(sys.argv[2]).iterdir()) if folder.is_dir()}
    folders["fixture"] = FIXTURE
    wanted = sys.argv[3:] or list(folders)
    given = json.loads((HERE / "cases.json").read_text("utf-8"))
    for name in wanted:
        tokenizer = load(folders[name])
        server = engine(tokenizer, tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None)
        lines, refused = [], {}
        for case in given:
            try:
                prompts = server.prompts(case["endpoint"], cases.expand(case["body"]))
            except Exception as error:
                prompts = None
                refused[case["name"]] = f"{type(error).__name__}: {error}"[:200]
            found = None if prompts is None else [digest(ids) for ids in prompts]
            lines.append(f"  {json.dumps(case['name'])}: {json.dumps(found)}")
        (HERE / "expected" / f"{name}.{sys.argv[1]}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
        print(name, len(given) - len(refused), "rendered", len(refused), "refused")
        for case, reason in refused.items():
            print("   ", case, "|", " ".join(reason.split()), file=sys.stderr)


if __name__ == "__main__":
    main()
