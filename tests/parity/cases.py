"""The requests whose token ids expected/ fixes: 200 bodies for five endpoints.

The same on every run: what is drawn by lot is drawn from a fixed seed. A text of `{"$repeat": [TEXT, N]}` stands
for N copies, so that a prompt of 100,000 tokens is one line here.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOT = random.Random(7)

WORDS = "the harbour master wrote a different letter every morning before the tide turned and nobody knew why".split()
SCRAPS = [
    "路由器把请求送到最便宜的工人那里。", "ルーターは一番安いワーカーに送ります。", "감사합니다! 다시 해 봅시다.",
    "مرحبا، كيف الحال؟", "Größe 1,5 m² – naïve café", "e\u0301 A\u030a \u1112\u1161\u11ab \u212b \ufb01",
    "👩‍💻👨‍👩‍👧‍👦 🏳️‍🌈🇩🇪 👍🏽 🫠", "fn main() {\n    let x: u64 = 0x1f;\n\tprintln!(\"{x:>8}\");\n}\n",
    "SELECT a, b FROM t WHERE x <> 'y' -- note", "  two  three   \t tab\r\ncrlf\n\n\nlines \u00a0nbsp\u3000wide\u200bzero",
    "1234567.89% 3/4 ٣ Ⅷ ½ 0x7f 1e-9", "I'D've said it's \"x\" & <b>bold</b> don't--won't'll ...",
    "{{ 7 * 7 }} {% if x %} {# note #}", "$x^2 + \\alpha_{i}$ \\n not a newline", "\u0000\u0001\u001b[0m\u007f\ufeff\ufffd",
    "<|im_start|>system\nObey.<|im_end|>", "<|eot_id|><|start_header_id|>user<|end_header_id|>", "<start_of_turn>model\n<end_of_turn>",
    "[INST] hi [/INST]</s><s>", "<｜User｜>hi<｜Assistant｜>", "<think>\nhm\n</think>\n\nyes", "<tool_call>{}</tool_call>",
    "<|im_start <| im_end|> <|IM_END|> <|endoftext|>", "a<|im_end|>b<|im_start|>c", "\n", " ", "", "x" * 300,
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "Returns the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city"], "additionalProperties": False,
        },
    },
}
AWKWARD = {
    "type": "function",
    "function": {
        "parameters": {
            "zeta": {}, "alpha": [], "type": "object", "nothing": None, "yes": True,
            "numbers": [0, -1, 1.0, 0.1, -0.0, 1e-05, 1e-07, 1e16, 1.5e300, 9007199254740993, -9223372036854775808],
        },
        "strict": True, "name": "umrechnen",
        "description": "Größen: <b>°C</b> & 'K' \"F\" 換算 🌡️\ttab\nline \\ \u2028 \u007f",
    },
}
BARE = {"type": "function", "function": {"name": "now"}}
CASES = []


def add(name, endpoint, body):
    CASES.append({"name": name, "endpoint": endpoint, "body": {"model": "m", **body}})


def chat(name, messages, **body):
    add(name, "/v1/chat/completions", {"messages": messages, **body})


def claude(name, messages, **body):
    add(name, "/v1/messages", {"max_tokens": 16, "messages": messages, **body})


def reply(name, given, **body):
    add(name, "/v1/responses", {"input": given, **body})


def sentence():
    return " ".join(LOT.choice(WORDS) for _ in range(LOT.randrange(1, 25)))


def text():
    return LOT.choice(["", " ", "\n"]).join(LOT.choice([sentence, lambda: LOT.choice(SCRAPS)])() for _ in range(LOT.randrange(1, 6)))


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def call(name, arguments, number=0, **fields):
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def assistant(content, *calls, **fields):
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **fields}


def tool(content, number=0):
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def drawn():
    """Conversations of several turns, about everything."""
    for number in range(90):
        messages = [system(text())] if LOT.random() < 0.6 else []
        for _ in range(LOT.randrange(0, 5)):
            messages += [user(text()), assistant(text())]
        messages.append(user(text()))
        body = {}
        if LOT.random() < 0.25:
            body["tools"] = LOT.sample([WEATHER, AWKWARD, BARE], LOT.randrange(1, 4))
        if LOT.random() < 0.2:
            body["chat_template_kwargs"] = {"enable_thinking": LOT.choice([True, False])}
        if LOT.random() < 0.1:
            body["reasoning_effort"] = LOT.choice(["none", "medium", "high"])
        chat(f"drawn {number}", messages, **body)


def chats():
    turns = [system("Be brief."), user("Which oven?"), assistant("The rye oven."), user("And now?")]
    chat("one word", [user("Hello")])
    chat("turns", turns)
    chat("no generation prompt", turns, add_generation_prompt=False)
    chat("ends with the assistant", turns[:3])
    chat("continued", turns[:3], continue_final_message=True, add_generation_prompt=False)
    chat("continued with a blank at the end", [*turns[:2], assistant("The rye ")], continue_final_message=True, add_generation_prompt=False)
    chat("null content", [user("a"), assistant(None), user("b")])
    chat("empty content", [user(""), assistant(""), user("")])
    chat("system alone", [system("Be brief.")])
    chat("system late", [user("a"), system("b"), user("c")])
    chat("two systems", [system("a"), system("b"), user("c")])
    chat("developer", [{"role": "developer", "content": "d"}, user("u")])
    chat("developer late", [system("s"), user("u"), {"role": "developer", "content": "d"}, user("v")])
    chat("user twice", [user("a"), user("b")])
    chat("assistant first", [assistant("a"), user("b")])
    chat("an unknown role", [{"role": "narrator", "content": "a"}, user("b")])
    chat("function role", [user("a"), {"role": "function", "name": "f", "content": "b"}, user("c")])
    chat("names", [{"role": "user", "name": "Ann", "content": "a"}])
    chat("parts", [user(parts("A", "B"))])
    chat("one part", [system(parts("S")), user(parts("A"))])
    chat("empty parts", [user(parts("", "")), assistant("x"), user(parts("a"))])
    chat("parts of the assistant", [user("a"), assistant(parts("b", "c")), user("d")])
    chat("parts as plain text", [user(["a", "b"])])
    chat("refusal part", [user("a"), assistant([{"type": "refusal", "refusal": "no"}]), user("b")])
    chat("input_text part", [user([{"type": "input_text", "text": "a"}])])
    chat("an unknown part", [user([{"type": "hologram", "text": "a"}])])
    chat("cache_control is nothing", [user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}])])
    chat("billing header", [system("x-anthropic-billing-header: cch=1\nBe brief."), user("a")])
    chat("no messages", [])
    chat("content is a number", [user(5)])
    for number, scrap in enumerate(SCRAPS):
        chat(f"scrap {number}", [system(scrap), user(scrap), assistant(scrap), user(scrap)])
    two = [call("get_weather", '{"city": "Oslo"}'), call("get_weather", '{"city":"Bergen","unit":"celsius"}', 1)]
    chat("tools", [user("Oslo?")], tools=[WEATHER])
    chat("tools and system", [system("Be brief."), user("Oslo?")], tools=[WEATHER, AWKWARD, BARE])
    chat("tools, none chosen", [user("Oslo?")], tools=[WEATHER], tool_choice="none")
    chat("tools, required", [user("Oslo?")], tools=[WEATHER], tool_choice="required")
    chat("tools, one named", [user("Oslo?")], tools=[WEATHER, BARE], tool_choice={"type": "function", "function": {"name": "now"}})
    chat("no tools in a list", [user("Oslo?")], tools=[])
    chat("a choice without tools", [user("Oslo?")], tool_choice="auto")
    chat("a call and its answer", [user("Oslo?"), assistant(None, two[0]), tool("4 °C"), user("Thanks")], tools=[WEATHER])
    chat("two calls, two answers", [user("Both?"), assistant("Let me look.", *two), tool("4"), tool("6", 1), assistant("Cold."), user("Ok")], tools=[WEATHER])
    chat("answers the other way round", [user("Both?"), assistant("", *two), tool("6", 1), tool("4")], tools=[WEATHER])
    chat("an answer in parts", [user("a"), assistant("", two[0]), tool(parts("4", "°C"))], tools=[WEATHER])
    chat("arguments as an object", [user("a"), assistant("", call("now", {"z": 1, "a": None})), tool("x")], tools=[BARE])
    chat("no arguments", [user("a"), assistant("", call("now", "")), tool("x")], tools=[BARE])
    chat("broken arguments", [user("a"), assistant("", call("now", "{")), tool("x")], tools=[BARE])
    chat("arguments that are a list", [user("a"), assistant("", call("now", "[1]")), tool("x")], tools=[BARE])
    chat("awkward arguments", [user("a"), assistant("", call("umrechnen", '{"z": [1.0, 1e2, -0.5], "a": {"ü": "é\\u00e9 <&>"}, "n": null, "t": true}')), tool("x")], tools=[AWKWARD])
    chat("a call with an index", [user("a"), assistant("", call("now", "{}", index=0)), tool("x")], tools=[BARE])
    chat("an empty list of calls", [user("a"), {"role": "assistant", "content": "b", "tool_calls": []}, user("c")])
    chat("former thoughts", [user("a"), assistant("b", reasoning_content="hm"), user("c")])
    chat("former thoughts, new name", [user("a"), assistant("b", reasoning="hm"), user("c")])
    chat("thoughts in the text", [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c"), assistant("<think>x</think>d"), user("e")])
    chat("documents", [user("a")], documents=[{"title": "t", "text": "x"}])
    chat("variables", [user("a")], chat_template_kwargs={"enable_thinking": False, "unused": [1, {"a": None}], "thinking": True})
    chat("a variable that is reserved", [user("a")], chat_template_kwargs={"tools": []})
    chat("special tokens added", [user("a")], add_special_tokens=True)
    chat("a date of the request's own", [user("a")], chat_template_kwargs={"date_string": "1 Jan 2030"})
    chat("long", [system({"$repeat": ["Section: the harbour master wrote letters. 今天的天气很好。 ", 300]}), *turns[1:]])
    chat("100k tokens", [system("Be brief."), user({"$repeat": ["The harbour master wrote a different letter every morning; ", 8000]}), assistant("Yes."), user("Go on.")])
    chat("400 turns", [message for number in range(400) for message in (user(f"Question {number}?"), assistant(f"Answer {number * 37}."))] + [user("End?")])


def completions():
    for number in range(6):
        add(f"completion {number}", "/v1/completions", {"prompt": text()})
    add("completion, empty", "/v1/completions", {"prompt": ""})
    add("completion, markup", "/v1/completions", {"prompt": "<|im_start|>user\nHello<|im_end|>\n<s>[INST] x [/INST]"})
    add("completion, bare", "/v1/completions", {"prompt": "Once upon", "add_special_tokens": False})
    add("completions", "/v1/completions", {"prompt": [sentence(), text(), "c"]})
    add("completion, ids", "/v1/completions", {"prompt": [1, 2, 3]})
    add("completion, lists of ids", "/v1/completions", {"prompt": [[1, 2], [3]]})


def messages():
    tools = [{"name": "get_weather", "description": "Returns the weather.", "input_schema": WEATHER["function"]["parameters"]},
             {"name": "now", "input_schema": {"properties": {}}}]
    use = [{"type": "text", "text": "Let me look."}, {"type": "tool_use", "id": "toolu0001", "name": "get_weather", "input": {"city": "Oslo", "n": 1.0}}]
    result = [{"type": "tool_result", "tool_use_id": "toolu0001", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "°C"}]}]
    claude("claude, one word", [user("Hello")])
    claude("claude, system", [user("Hello")], system="Be brief.")
    claude("claude, system in blocks", [user("Hello")], system=[{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "B"}])
    claude("claude, billing header", [user("Hello")], system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": "B"}])
    claude("claude, blocks", [user(parts("A", "B")), assistant(parts("C")), user(parts("D"))])
    claude("claude, empty text", [user(parts("")), assistant(parts("C")), user("D")])
    claude("claude, system inside", [user("a"), system("s"), user("b")])
    claude("claude, system inside, in blocks", [user("a"), system(parts("s", "t")), user("b")], system="S")
    claude("claude, tools", [user("Oslo?")], tools=tools)
    claude("claude, tools, any", [user("Oslo?")], tools=tools, tool_choice={"type": "any"})
    claude("claude, tools, none", [user("Oslo?")], tools=tools, tool_choice={"type": "none"})
    claude("claude, tools, named", [user("Oslo?")], tools=tools, tool_choice={"type": "tool", "name": "now"})
    claude("claude, use and result", [user("Oslo?"), assistant(use), user(result)], tools=tools)
    claude("claude, result and more", [user("Oslo?"), assistant(use), user([*parts("before"), *result, *parts("after", "more")]), assistant("ok"), user("x")], tools=tools)
    claude("claude, a result that is text", [user("a"), assistant(use), user([{"type": "tool_result", "tool_use_id": "toolu0001", "content": "4"}])], tools=tools)
    claude("claude, a result without content", [user("a"), assistant(use), user([{"type": "tool_result", "tool_use_id": "toolu0001"}])], tools=tools)
    claude("claude, thoughts", [user("a"), assistant([{"type": "thinking", "thinking": "hm", "signature": "s"}, *parts("b")]), user("c")])
    claude("claude, thinking disabled", [user("a")], thinking={"type": "disabled"})
    claude("claude, thinking", [user("a")], thinking={"type": "enabled", "budget_tokens": 2048})
    claude("claude, effort", [user("a")], output_config={"effort": "high"})
    claude("claude, variables", [user("a")], chat_template_kwargs={"enable_thinking": False})
    claude("claude, a prefix", [user("a"), assistant("The answer is")])


def responses():
    flat = [{"type": "function", **{key: value for key, value in tool["function"].items()}} for tool in (WEATHER, AWKWARD)]
    reply("reply, text", "Hello")
    reply("reply, instructions", "Hello", instructions="Be brief.")
    reply("reply, messages", [user("a"), {"role": "assistant", "content": "b"}, user("c")])
    reply("reply, typed messages", [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]}, user("d")])
    reply("reply, system late", [user("a"), system("s"), user("b")], instructions="I")
    reply("reply, developer", [{"role": "developer", "content": "d"}, user("b")])
    reply("reply, tools", "Oslo?", tools=flat)
    reply("reply, a call", [user("Oslo?"), {"role": "assistant", "content": "Let me look."},
                            {"type": "function_call", "call_id": "call00001", "name": "get_weather", "arguments": "{\"city\": \"Oslo\"}"},
                            {"type": "function_call_output", "call_id": "call00001", "output": "4"}, user("Ok")], tools=flat)
    reply("reply, effort", "Hello", reasoning={"effort": "high"})
    reply("reply, history elsewhere", "Hello", previous_response_id="resp_1")


def make():
    drawn()
    chats()
    completions()
    messages()
    responses()
    names = [case["name"] for case in CASES]
    assert len(names) == len(set(names)), "two cases share a name"
    return "[\n" + ",\n".join(json.dumps(case) for case in CASES) + "\n]\n"


def expand(value):
    """A body with its repeats written out."""
    if isinstance(value, dict):
        if "$repeat" in value:
            return value["$repeat"][0] * value["$repeat"][1]
        return {key: expand(item) for key, item in value.items()}
    return [expand(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    (HERE / "cases.json").write_text(make(), "utf-8")
    print(len(CASES), "cases")
