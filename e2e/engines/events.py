"""KV cache events of a real engine, read the slow and obvious way.

It owns the ZMQ and msgpack side of these scripts and a second opinion on the router: `Mirror` follows one worker's cache from
its events alone, in a way that shares nothing with the router's code. It reads the layout of the engine versions installed
here (events are maps) and no older one.

usage: events.py replay tcp://HOST:PORT [FIRST_SEQ]     prints what a worker's replay socket still holds
       events.py listen tcp://HOST:PORT [SECONDS]       prints batches as they come
"""

import hashlib
import struct
import sys
import threading
import time

import msgpack
import zmq

END_OF_REPLAY = b"\xff" * 8
REPLAY_TIMEOUT_MS = 5000


def decode(payload):
    """A batch's events, as maps."""
    _timestamp, events, *_rank = msgpack.unpackb(payload, strict_map_key=False)
    return events


def replay(context, endpoint, first=0):
    """Yields (seq, events) for every batch from `first` on that the worker still buffers."""
    socket = context.socket(zmq.DEALER)  # a REQ socket could read the first reply only
    socket.connect(endpoint)
    socket.send_multipart([b"", struct.pack(">Q", first)])
    try:
        while socket.poll(REPLAY_TIMEOUT_MS):
            # Engines differ in what they put before the sequence number, so frames are counted from the end.
            *_, seq, payload = socket.recv_multipart()
            if seq == END_OF_REPLAY:
                return
            yield struct.unpack(">Q", seq)[0], decode(payload)
        raise TimeoutError(f"{endpoint} did not finish its replay within {REPLAY_TIMEOUT_MS} ms of silence")
    finally:
        socket.close(linger=0)


class Mirror:
    """What one worker holds, as its events say: a count per chain of blocks.

    A chain is a block with all blocks before it. Engines store and remove one block several times, hence a count.
    """

    def __init__(self):
        self.chain_of = {}  # engine's hash -> our digest of the whole chain
        self.copies = {}  # our digest -> how often it is held
        self.since = {}  # our digest -> when it was last stored, as time.monotonic()
        self.stored = self.removed = self.cleared = self.orphans = 0

    @staticmethod
    def link(parent, tokens):
        return hashlib.blake2b(parent + struct.pack(f"<{len(tokens)}I", *tokens), digest_size=16).digest()

    def apply(self, event, now):
        kind = event["type"]
        if kind == "BlockStored":
            self.store(event, now)
        elif kind == "BlockRemoved":
            for engine_hash in event["block_hashes"]:
                self.removed += 1
                self.drop(self.chain_of.get(engine_hash))
        elif kind == "AllBlocksCleared":
            self.cleared += 1
            self.copies.clear()
            self.chain_of.clear()

    def store(self, event, now):
        size, tokens = event["block_size"], event["token_ids"]
        parent = event.get("parent_block_hash")
        if parent is not None and parent not in self.chain_of:
            self.orphans += 1
            return
        chain = b"" if parent is None else self.chain_of[parent]
        for number, engine_hash in enumerate(event["block_hashes"]):
            chain = self.link(chain, tokens[number * size : (number + 1) * size])
            self.chain_of[engine_hash] = chain
            self.since[chain] = self.since.get(chain, now) if chain in self.copies else now
            self.copies[chain] = self.copies.get(chain, 0) + 1
            self.stored += 1

    def drop(self, chain):
        if self.copies.get(chain, 0) > 1:
            self.copies[chain] -= 1
        else:
            self.copies.pop(chain, None)

    def held(self):
        """A copy to ask later, when the mirror has moved on."""
        return frozenset(self.copies)


def chains(tokens, block_size):
    """The chains that a prompt can reuse: whole blocks, and never its last token, which must be computed to answer at all."""
    chain, result = b"", []
    for end in range(block_size, len(tokens), block_size):
        chain = Mirror.link(chain, tokens[end - block_size : end])
        result.append(chain)
    return result


def leading(prompt_chains, held):
    """How many of a prompt's chains are held, up to the first that is not."""
    for count, chain in enumerate(prompt_chains):
        if chain not in held:
            return count
    return len(prompt_chains)


class Listener(threading.Thread):
    """Follows several workers at once; `mirrors` is keyed as `endpoints` is."""

    def __init__(self, endpoints):
        super().__init__(daemon=True)
        self.mirrors = {name: Mirror() for name in endpoints}
        self.gaps = 0
        self.lock = threading.Lock()
        context = zmq.Context.instance()
        self.sockets = {}
        for name, (events, replays) in endpoints.items():
            socket = context.socket(zmq.SUB)
            socket.connect(events)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            time.sleep(0.3)  # a subscription takes a moment to reach the publisher; what comes twice is dropped below
            after = -1
            for after, batch in replay(context, replays):
                for event in batch:
                    self.mirrors[name].apply(event, time.monotonic())
            self.sockets[socket] = [name, after]

    def run(self):
        poller = zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                _topic, seq, payload = socket.recv_multipart()
                now, seq = time.monotonic(), struct.unpack(">Q", seq)[0]
                source = self.sockets[socket]
                if seq <= source[1]:
                    continue
                with self.lock:
                    self.gaps += seq != source[1] + 1
                    source[1] = seq
                    for event in decode(payload):
                        self.mirrors[source[0]].apply(event, now)

    def held(self):
        with self.lock:
            return {name: mirror.held() for name, mirror in self.mirrors.items()}

    def known_since(self, name, prompt_chains):
        """When the last of these became known; None if one is not known yet or there are none."""
        with self.lock:
            times = [self.mirrors[name].since.get(chain) for chain in prompt_chains]
        return max(times) if times and None not in times else None


def show(seq, events):
    for event in events:
        hashes = event.get("block_hashes") or []
        tokens = event.get("token_ids") or []
        print(f"seq {seq} {event['type']} blocks={len(hashes)} tokens={len(tokens)} block_size={event.get('block_size')} medium={event.get('medium')}", flush=True)


def main():
    mode, endpoint, *rest = sys.argv[1:]
    context = zmq.Context.instance()
    if mode == "replay":
        for seq, events in replay(context, endpoint, int(rest[0]) if rest else 0):
            show(seq, events)
    elif mode == "listen":
        socket = context.socket(zmq.SUB)
        socket.connect(endpoint)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        until = time.monotonic() + float(rest[0] if rest else 60)
        while (left := until - time.monotonic()) > 0:
            if socket.poll(int(left * 1000)):
                _topic, seq, payload = socket.recv_multipart()
                show(struct.unpack(">Q", seq)[0], decode(payload))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
