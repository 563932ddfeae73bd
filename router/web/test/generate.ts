// Lab traces from a seed: small worlds with everything in them that a lab trace may hold.

/** Numbers below `limit`, from a linear congruential generator that prints its seed. */
export function dice(seed: number): (limit: number) => number {
  let state = BigInt(seed) * 6364136223846793005n + 1n;
  return (limit) => {
    state = (state * 6364136223846793005n + 1442695040888963407n) & ((1n << 64n) - 1n);
    return Number((state >> 33n) % BigInt(limit));
  };
}

const NAMES = ["w1", "w10", "w2", "Wien", "ü-7", "😀", "ﬀ", "<img src=x onerror=alert(1)>", 'a"b\\c', "node:8000"];
const TENANTS = ["acme", "globex", "inïtech", `t-${"x".repeat(150)}`];

type Row = Record<string, unknown>;

export function generate(seed: number): Record<string, Row[] | number> {
  const roll = dice(seed);
  const blockSize = [1, 4, 16, 16, 16, 64][roll(6)] as number;
  const names = [...NAMES].sort(() => roll(3) - 1).slice(0, 1 + roll(8));
  const adapter = () => (roll(5) === 0 ? "lora-1" : "none");
  const namespace = () => ({ tenant: TENANTS[roll(seed % 4 || 2)], model: "m", adapter_digest: adapter() });
  const family = () => ["system", "chat", "doc", "a/b"][roll(4)];
  const blocks = (count: number): string[] => {
    const kind = family();
    const shared = Math.min(count, roll(count + 1));
    const own = count - shared;
    const name = `tail-${roll(6)}`;
    return [
      ...(shared > 0 ? [`${kind}/1..${shared}`] : []),
      ...(own > 2 ? [`${name}/1..${own}`] : Array.from({ length: own }, (_, n) => `${name}/${n + 1}`)),
    ];
  };
  const epochs = names.map(() => (roll(6) === 0 ? 1_795_970_300_559 : roll(5)));
  const workers = names.map((worker, place) => ({
    worker,
    epoch: epochs[place],
    tick: roll(3) === 0 ? roll(500) : 0,
    queued_prefill_tokens: roll(2) * roll(2000),
    active_decode_tokens: roll(2) * roll(3000),
    entries: Array.from({ length: roll(4) }, () => ({ ...namespace(), blocks: blocks(1 + roll(12)) })),
  }));
  let tick = 0;
  const step = () => (tick += [0, 0, roll(20), roll(200), roll(4000)][roll(5)] as number);
  const used = new Set<string>();
  const events: Row[] = [];
  for (let n = roll(40); n > 0; n -= 1) {
    const place = roll(names.length);
    if (roll(12) === 0) epochs[place] = (epochs[place] as number) + 1;
    const epoch = Math.max(0, (epochs[place] as number) - (roll(6) === 0 ? 1 : 0));
    const event = { tick: roll(30_000), seq: roll(200), worker: names[place], epoch };
    const key = JSON.stringify(event);
    if (used.has(key)) continue;
    used.add(key);
    const kind = ["stored", "stored", "stored", "removed", "cleared"][roll(5)];
    events.push({ ...event, kind, ...namespace(), blocks: kind === "cleared" && roll(2) ? [] : blocks(1 + roll(10)) });
  }
  const requests = Array.from({ length: roll(65) }, (_, n) => {
    const prompt = roll(40) === 0 ? 0 : roll(Math.min(8192, blockSize * 40));
    return {
      id: `r${n}`,
      tick: step(),
      seq: roll(300),
      ...namespace(),
      template_digest: "chat",
      prefix_blocks: blocks(Math.floor(prompt / blockSize)),
      prompt_tokens: prompt,
      expected_decode_tokens: roll(300),
    };
  });
  return { schema_version: 1, block_size: blockSize, workers, events, requests };
}

/** The same objects in another order, fields too. */
export function shuffle(value: unknown, seed: number): unknown {
  const roll = dice(seed + 1000);
  const mix = <T>(items: T[]): T[] => {
    const left = [...items];
    return items.map(() => left.splice(roll(left.length), 1)[0] as T);
  };
  const walk = (one: unknown, key: string): unknown => {
    if (Array.isArray(one)) {
      const items = one.map((item) => walk(item, ""));
      return ["workers", "events", "requests", "entries"].includes(key) ? mix(items) : items;
    }
    if (one === null || typeof one !== "object") return one;
    return Object.fromEntries(mix(Object.entries(one)).map(([name, item]) => [name, walk(item, name)]));
  };
  return walk(value, "");
}
