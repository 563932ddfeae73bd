"""What the users of the tiny model say: many-turn conversations, the same on every run.

Each kind of conversation is here because it can make a router's tokens differ from the engine's, or its prefix from the
neighbour's. The texts mean nothing; the model answers noise.
"""

import random

# Shared word for word by every conversation of a kind, and longer than several blocks of 32 tokens.
SUPPORT = "You answer customers of a bicycle shop. " + " ".join(
    f"Rule {n}: {rule}." for n, rule in enumerate(
        [
            "greet the customer by name when it is known",
            "never promise a delivery date that the warehouse has not confirmed",
            "prices include VAT unless the customer is a dealer",
            "a frame has five years of warranty, bearings and chains have two",
            "return labels are free within 30 days; after that they cost 4.90 EUR",
            "ask for the serial number before you discuss a recall",
            "hand over to a human when the customer asks twice",
            "keep answers below four sentences, and do not use exclamation marks",
        ], 1)
)
RECHT = (
    "Du bist eine Hilfe für Mietrecht in München. Nenne Paragraphen (z. B. § 536 BGB, § 573c Abs. 1) genau, "
    "übertreibe nicht und weise höflich darauf hin, daß Auskünfte keine Rechtsberatung ersetzen. "
    "Größen gibst Du in m² an, Beträge mit Komma: 1.234,50 €. Rückfragen stellst Du einzeln, "
    "und zwar immer zuerst nach dem Datum des Vertrags, dann nach Schönheitsreparaturen und Nebenkosten."
)
NIHONGO = (
    "あなたは京都の旅館で働く案内係です。丁寧な言葉で、短く答えてください。"
    "お客様の到着時刻、人数、食事の希望を順番に確認し、アレルギーがある場合は必ず料理長に伝えると約束します。"
    "温泉は午前五時から午後十一時まで利用できます。料金は一泊一万八千円からです。"
)
CODE = """You review Rust. Answer with a patch only.

\tfn main() {
\t    let xs: Vec<u8> = vec![1, 2, 3];   // three   spaces
\t    for (i, x) in xs.iter().enumerate() {
\t\t\tprintln!("{i}\\t{x:>08b}\\r\\n");
\t    }
\t}

    Trailing blanks matter:   
<|not_a_special_token|> and {{ braces }} and {% percent %} stay as they are.
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_train",
            "description": "Finds a train between two stations, e.g. \"Zürich HB\" → \"Genève\".",
            "parameters": {
                "type": "object",
                "properties": {
                    "from": {"type": "string", "description": "station, as written on the sign"},
                    "to": {"type": "string"},
                    "class": {"type": "integer", "enum": [1, 2], "default": 2},
                    "max_price": {"type": "number", "exclusiveMinimum": 0.5},
                    "stops": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
                },
                "required": ["from", "to"],
                "additionalProperties": False,
            },
        },
    },
    # No description, a key that is null or absent by the engine's taste, and keys in an order that vLLM does not keep.
    {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, "strict": False, "name": "weather"}},
]

LATIN = [
    "My order {n} has not arrived, and the tracking page says \"unknown\". What should I do next?",
    "And how long does that take? I leave on the {n}th.",
    "It's the blue one (size 54), bought together with two tyres & a pump; the invoice says {n},00 EUR.",
    "ok",
    "Please repeat the whole thing in simpler words, step by step, so that my father understands it as well. He has had bike number {n} since 1974.",
    "Thanks!  \n\nOne more question:\n1. what about the bell?\n2. what about the lamp, model L-{n}/b?\n",
]
WIDE = [
    "明日の午後三時ごろ、{n}人で着きます。夕食は遅くても大丈夫ですか？",
    "Grüß Gott! Die Miete beträgt {n},50 € – ist die Erhöhung um 20 % zulässig?",
    "👩‍👩‍👧‍👦 {n}× 🍣 please 🙏🏽, and e\u0301 is not é, nor is ﬁ the same as fi; ½ + ¼ = ¾",
    "Здравствуйте, номер заказа {n}. Спасибо!",
    "مرحبا، رقم الطلب {n} لم يصل بعد",
    "नमस्ते, {n} टिकट चाहिए। ‎\u200bनहीं, रुकिए…",
]
SOURCE = [
    "fn f(x: u{n}) -> Option<u64> {{\n    x.checked_mul(3)?\n        .checked_add({n})\n}}",
    "```python\nif x == {n}:\n\treturn  None   # odd\n```",
    "diff --git a/x b/x\n@@ -{n},3 +{n},4 @@\n-old\n+new\n \n",
    "SELECT * FROM t WHERE id={n} AND name LIKE '%\\_%' -- <|im_sep|>",
]

#        kind       system prompt  what users say  content   what else the request carries
KINDS = {
    "support": (SUPPORT, LATIN, "string", {}),
    "mietrecht": (RECHT, WIDE, "string", {}),
    "ryokan": (NIHONGO, WIDE, "string", {}),
    "review": (CODE, SOURCE, "string", {}),
    "default": (None, LATIN, "string", {}),  # the template puts its own system prompt
    "own": ("You are assistant number {id}, and nobody else is. " + RECHT, LATIN, "string", {}),  # shares no block
    "parts": (SUPPORT, WIDE, "parts", {}),  # content as a list of text parts, which engines join differently
    "tools": (None, LATIN, "string", {"tools": TOOLS}),  # tools are rendered into the prompt
    "no-tools": (SUPPORT, LATIN, "string", {"tools": TOOLS, "tool_choice": "none"}),  # vLLM renders them still, SGLang does not
}


class Conversation:
    """One user's conversation; `ask` adds the next question, `answer` what the model said."""

    def __init__(self, number, kind, turns):
        self.name, self.kind, self.number = f"{kind}-{number}", kind, number
        system, self.phrases, self.content, self.extras = KINDS[kind]
        self.messages = [{"role": "system", "content": system.replace("{id}", str(number))}] if system else []
        self.turn, self.turns = 0, turns
        self.last_target = None  # who answered the last turn

    def ask(self):
        self.turn += 1
        # Conversations of one kind differ from their first question on.
        text = self.phrases[(self.number + self.turn) % len(self.phrases)].format(n=self.number * 100 + self.turn)
        content = text
        if self.content == "parts":
            content = [{"type": "text", "text": text}, {"type": "text", "text": f"part {self.turn}"}]
        self.messages.append({"role": "user", "content": content})

    def answer(self, text):
        self.messages.append({"role": "assistant", "content": text})

    def ended(self):
        return self.turn >= self.turns


def interleaved(requests, alive, seed):
    """Yields the conversation whose turn it is, `requests` times; `alive` conversations go on at any time."""
    chance = random.Random(seed)
    kinds = list(KINDS)
    running, begun = [], 0
    for _ in range(requests):
        while len(running) < alive:
            running.append(Conversation(begun, kinds[begun % len(kinds)], chance.randint(3, 9)))
            begun += 1
        conversation = chance.choice(running)
        yield conversation
        if conversation.ended():
            running.remove(conversation)
