"""Drives many-turn chats through a router with the official OpenAI SDK, and compares what the router predicted with what
the engine did.

Per request it prints the hit that the router predicted when it chose the worker (from the router's receipts) beside the
`cached_tokens` that the engine reported, and at the end the share of requests in which they are equal. It exits with 1 when
that share is below --min-share or when nothing was ever cached, which would make equality worthless.

Where it is given the workers' event ports, it also predicts by itself (events.py) and says for each difference whether the
router or the engine departed from the events, and it measures how long after an answer its events come. The router knows a
cache by its events, so a question sent faster than that may be judged by older knowledge; --think-ms is the pause between
an answer and the next question.

With --no-router the URL is one engine's, and the prediction is events.py's alone.
"""

import argparse
import csv
import json
import pathlib
import random
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid

import openai

import events
from conversations import interleaved

RECEIPT_PATIENCE_S = 3.0  # receipts are written off the hot path
COLUMNS = ["n", "conversation", "turn", "mode", "target", "prompt_tokens", "predicted_hit_tokens", "cached_tokens", "equal", "outcome", "own_prediction", "note"]


def fetch_json(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def prediction(admin, request_id):
    """What the router believed when it chose: the one place that knows the shape of its receipts. None: no receipt came."""
    url = f"{admin}/v1/admin/receipts?request_id={urllib.parse.quote(request_id)}"
    until = time.monotonic() + RECEIPT_PATIENCE_S
    while time.monotonic() < until:
        try:
            receipts = fetch_json(url)["receipts"]
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            receipts = []
        chosen = [receipt for receipt in receipts if receipt.get("chosen")]  # an attempt that found no worker has none
        if chosen:
            last = chosen[-1]
            return {
                "target": last["chosen"]["target"],
                "prompt_tokens": last["prompt_tokens"],
                "predicted_hit_tokens": last["predicted_hit_tokens"],
                "outcome": last["outcome"],
                "receipt": last,
            }
        time.sleep(0.05)
    return None


def ask(client, conversation, request_id, streamed, max_tokens):
    """Sends the conversation as it stands. Returns the answer's text and its usage."""
    arguments = {
        "model": "tiny",
        "messages": conversation.messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "extra_headers": {"X-Request-Id": request_id},
    }
    arguments.update(conversation.extras)
    if not streamed:
        response = client.chat.completions.create(**arguments)
        return response.choices[0].message.content or "", response.usage
    text, usage = "", None
    with client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            usage = chunk.usage or usage
    if usage is None:
        raise RuntimeError("the stream ended without usage")
    return text, usage


def address(target):
    """host:port of host:port#rank"""
    return target.partition("#")[0]


def cached_tokens(usage):
    """Engines leave the details out when nothing was cached."""
    details = usage.prompt_tokens_details
    return (details and details.cached_tokens) or 0


class Driver:
    def __init__(self, options):
        self.options = options
        self.client = openai.OpenAI(base_url=f"{options.base}/v1", api_key="none", max_retries=0, timeout=120)
        self.out = pathlib.Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows, self.lags_ms, self.pauses_ms = [], [], []
        self.later = self.stayed = self.missing = 0
        self.answered = None  # when the last answer ended
        self.listener = None
        if options.worker:
            self.listener = events.Listener(options.worker)
            self.listener.start()

    def run(self):
        options = self.options
        chance = random.Random(options.seed)
        self.header()
        with open(self.out / "receipts.jsonl", "w") as receipts:
            for n, conversation in enumerate(interleaved(options.requests, options.alive, options.seed), 1):
                conversation.ask()
                row, receipt = self.one(n, conversation, streamed=chance.random() < 0.5, max_tokens=chance.randint(8, 24))
                self.rows.append(row)
                self.show(row)
                if receipt:
                    receipts.write(json.dumps(receipt, ensure_ascii=False) + "\n")
        with open(self.out / "requests.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)
        return self.summary()

    def one(self, n, conversation, streamed, max_tokens):
        request_id = f"drive-{uuid.uuid4().hex}"
        row = dict.fromkeys(COLUMNS, "")
        row.update(n=n, conversation=conversation.name, turn=conversation.turn, mode="stream" if streamed else "whole", equal="no")
        before, sent = self.listener and self.listener.held(), time.monotonic()
        if self.answered:
            self.pauses_ms.append((sent - self.answered) * 1000)
        previous_answered = self.answered
        try:
            text, usage = ask(self.client, conversation, request_id, streamed, max_tokens)
        except (openai.OpenAIError, RuntimeError) as error:
            row.update(outcome="error", note=str(error))
            conversation.messages.pop()
            return row, None
        self.answered = time.monotonic()
        believed = {"target": self.options.base.removeprefix("http://")} if self.options.no_router else prediction(self.options.admin, request_id)
        row.update(prompt_tokens=usage.prompt_tokens, cached_tokens=cached_tokens(usage))
        if believed is None:
            self.missing += 1
            row.update(outcome="no receipt", note=f"no receipt within {RECEIPT_PATIENCE_S:.0f} s")
        else:
            row.update(target=believed["target"])
            self.follow(conversation, believed["target"])
            tokens = self.tokenise(believed["target"], conversation)
            prompt_chains = tokens and events.chains(tokens, self.options.block_size)
            if tokens:
                row["own_prediction"] = events.leading(prompt_chains, before[address(believed["target"])]) * self.options.block_size
            known = self.known_since(believed["target"], prompt_chains, row["cached_tokens"])
            if known and previous_answered:
                self.lags_ms.append(max(0.0, (known - previous_answered) * 1000))
            predicted = row["own_prediction"] if self.options.no_router else believed["predicted_hit_tokens"]
            row.update(predicted_hit_tokens=predicted, outcome=believed.get("outcome", "-"))
            row["equal"] = "yes" if predicted == row["cached_tokens"] else "no"
            row["note"] = self.explain(row, believed, known and (known - sent) * 1000)
            if tokens and len(tokens) != usage.prompt_tokens:
                row["note"] += f" (the engine's own tokenize endpoint counts {len(tokens)} prompt tokens)"
        conversation.answer(text)
        time.sleep(max(0.0, self.answered + self.options.think_ms / 1000 - time.monotonic()))
        return row, believed and believed.get("receipt")

    def follow(self, conversation, target):
        if conversation.turn >= 2:
            self.later += 1
            self.stayed += target == conversation.last_target
        conversation.last_target = target

    def tokenise(self, target, conversation):
        """The prompt's tokens, by the engine itself. None where the worker's events are not followed."""
        if not self.listener or address(target) not in self.listener.mirrors:
            return None
        body = {"model": "tiny", "messages": conversation.messages, **conversation.extras}
        return fetch_json(f"http://{address(target)}/tokenize", body)["tokens"]

    def known_since(self, target, prompt_chains, cached):
        """When the events of all that the engine reused had come."""
        if not prompt_chains:
            return None
        return self.listener.known_since(address(target), prompt_chains[: cached // self.options.block_size])

    def explain(self, row, believed, known_after_ms):
        """Who departed from whom; empty where all agree. `known_after_ms`: question sent to last event of what was reused."""
        own, engine = row["own_prediction"], row["cached_tokens"]
        tokens = believed.get("prompt_tokens")
        if tokens not in (None, row["prompt_tokens"]):
            return f"the router counts {tokens} prompt tokens, the engine {row['prompt_tokens']}"
        if row["equal"] == "yes":
            return ""
        if own == "":
            return "no event port given, cause not examined"
        if known_after_ms and known_after_ms > 0:
            return f"an event of what was reused came {known_after_ms:.0f} ms after the question"
        if own == engine:
            return "the events known when it was sent say the same as the engine: the router's view was behind or wrong"
        return f"the events known when it was sent say {own}: the engine used something else"

    def header(self):
        options = self.options
        way = "straight to the engine, predictions from its events" if options.no_router else "through the router, predictions from its receipts"
        print(f"{options.label}: {options.requests} requests to {options.base}, {way}; openai {openai.__version__}, block {options.block_size}, {options.think_ms} ms between turns")
        print(f"{'n':>4} {'conversation':<13} {'turn':>4} {'mode':<6} {'target':<18} {'prompt':>6} {'predicted':>9} {'cached':>6} equal outcome")

    def show(self, row):
        print(
            f"{row['n']:>4} {row['conversation']:<13} {row['turn']:>4} {row['mode']:<6} {row['target']:<18} {row['prompt_tokens']:>6} "
            f"{row['predicted_hit_tokens']:>9} {row['cached_tokens']:>6} {row['equal']:<5} {row['outcome']}{'  ! ' + row['note'] if row['note'] else ''}",
            flush=True,
        )

    def summary(self):
        def total(column):
            return sum(row[column] or 0 for row in self.rows)

        rows = self.rows
        result = {
            "label": self.options.label,
            "requests": len(rows),
            "equal": sum(row["equal"] == "yes" for row in rows),
            "equal_with_hits": sum(row["equal"] == "yes" and row["cached_tokens"] > 0 for row in rows),
            "errors": sum(row["outcome"] == "error" for row in rows),
            "without_receipt": self.missing,
            "later_turns": self.later,
            "later_turns_on_same_worker": self.stayed,
            "targets": {target: sum(row["target"] == target for row in rows) for target in sorted({row["target"] for row in rows} - {""})},
            "prompt_tokens": total("prompt_tokens"),
            "predicted_hit_tokens": total("predicted_hit_tokens"),
            "cached_tokens": total("cached_tokens"),
            "think_ms": self.options.think_ms,
            "min_share": self.options.min_share,
        }
        result["share_equal"] = result["equal"] / len(rows)
        own = [row for row in rows if row["own_prediction"] != ""]
        if own:
            result["own_prediction_share_equal"] = sum(row["own_prediction"] == row["cached_tokens"] for row in own) / len(own)
        for name, values in (("event_lag_ms", sorted(self.lags_ms)), ("pause_ms", sorted(self.pauses_ms))):
            if values:
                result[name] = {"min": round(values[0], 1), "median": round(values[len(values) // 2], 1), "max": round(values[-1], 1)}
        if self.listener:
            result["events"] = {
                name: {"stored": mirror.stored, "removed": mirror.removed, "cleared": mirror.cleared, "orphans": mirror.orphans, "lost": self.listener.gaps, "held": len(mirror.copies)}
                for name, mirror in self.listener.mirrors.items()
            }
        result["passed"] = result["share_equal"] >= self.options.min_share and result["cached_tokens"] > 0
        (self.out / "summary.json").write_text(json.dumps(result, indent=1) + "\n")
        self.conclude(result)
        return result["passed"]

    def conclude(self, result):
        share = result["share_equal"]
        print(f"\n{result['label']}: predicted and cached tokens equal in {result['equal']} of {result['requests']} requests ({share:.1%}), {result['equal_with_hits']} of them with hits")
        print(f"  cached {result['cached_tokens']} of {result['prompt_tokens']} prompt tokens; predicted {result['predicted_hit_tokens']}")
        print(f"  requests by target: {', '.join(f'{target} {count}' for target, count in result['targets'].items())}")
        if self.later:
            print(f"  turns after the first on the worker of the turn before: {self.stayed} of {self.later} ({self.stayed / self.later:.1%})")
        if "own_prediction_share_equal" in result:
            print(f"  second opinion, straight from the events: equal in {result['own_prediction_share_equal']:.1%}")
        for name, counts in result.get("events", {}).items():
            print(f"  events of {name}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
        if pause := result.get("pause_ms"):
            print(f"  an answer's end to the next question: at least {pause['min']} ms, median {pause['median']} ms (asked for: {self.options.think_ms} ms)")
        if lag := result.get("event_lag_ms"):
            print(f"  an answer's end to the last event of what the next question reuses: median {lag['median']} ms, at most {lag['max']} ms; a question sent sooner is judged by older knowledge")
        for row in self.rows:
            if row["equal"] != "yes" or row["note"]:
                numbers = "" if row["cached_tokens"] == "" else f"predicted {row['predicted_hit_tokens']}, cached {row['cached_tokens']}: "
                print(f"  request {row['n']} ({row['conversation']}, turn {row['turn']}): {numbers}{row['note']}")
        if result["errors"]:
            print(f"  {result['errors']} requests failed; they count as not equal")
        if result["cached_tokens"] == 0 and result["errors"] < result["requests"]:
            print("  FAILED: the engine never reported a cached token; was it started with cached tokens in its usage?")
        elif not result["passed"]:
            print(f"  FAILED: the share is below {self.options.min_share}")


def worker(text):
    """HOST:PORT=EVENTS_PORT,REPLAY_PORT -> (HOST:PORT, endpoints)"""
    name, _, ports = text.partition("=")
    events_port, replay_port = ports.split(",")
    host = name.partition(":")[0]
    return name, (f"tcp://{host}:{events_port}", f"tcp://{host}:{replay_port}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="the router's URL, e.g. http://127.0.0.1:8000; with --no-router an engine's")
    parser.add_argument("--admin", help="the router's admin URL, e.g. http://127.0.0.1:9091")
    parser.add_argument("--no-router", action="store_true", help="talk to one engine and predict from its events")
    parser.add_argument("--worker", type=worker, action="append", default=[], metavar="HOST:PORT=EVENTS,REPLAY", help="a worker and its event and replay ports; may be repeated")
    parser.add_argument("--block-size", type=int, required=True, help="the router's, which is the engine's page here")
    parser.add_argument("--label", default="engine")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--alive", type=int, default=8, help="conversations that go on at the same time")
    parser.add_argument("--think-ms", type=int, default=50, help="pause between an answer and the next question")
    parser.add_argument("--min-share", type=float, default=0.99)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", default="out/engines", help="folder for requests.csv, receipts.jsonl, summary.json")
    options = parser.parse_args()
    options.base = options.base.rstrip("/")
    options.worker = dict(options.worker)
    if not options.no_router and not options.admin:
        parser.error("--admin is needed to read predictions (or --no-router)")
    if options.no_router and not options.worker:
        parser.error("--no-router predicts from events: give --worker")
    sys.exit(0 if Driver(options).run() else 1)


if __name__ == "__main__":
    main()
