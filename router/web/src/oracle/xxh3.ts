// XXH3-64 with a seed: how a router spreads what ties. Up to 240 bytes here, from its specification; longer input has
// the low half of XXH3-128 as its 64-bit form, and the library has that one.

import { Buffer } from "buffer";
import { XXH3_128 } from "xxh3-ts/xxh3.js";

const MASK = (1n << 64n) - 1n;
const P64_1 = 0x9e3779b185ebca87n;
const P64_2 = 0xc2b2ae3d27d4eb4fn;
const P64_3 = 0x165667b19e3779f9n;
const MX1 = 0x165667919e3779f9n;
const MX2 = 0x9fb21c651e98df25n;
const SECRET = view(
  "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c" +
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364" +
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e",
);

function view(hex: string): DataView {
  const bytes = Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
  return new DataView(bytes.buffer);
}

const r64 = (data: DataView, at: number): bigint => data.getBigUint64(at, true);
const r32 = (data: DataView, at: number): bigint => BigInt(data.getUint32(at, true));
const rotate = (value: bigint, by: bigint): bigint => ((value << by) | (value >> (64n - by))) & MASK;
const fold = (a: bigint, b: bigint): bigint => {
  const product = a * b;
  return (product & MASK) ^ (product >> 64n);
};
const mix = (data: DataView, at: number, secret: number, seed: bigint): bigint =>
  fold(
    r64(data, at) ^ ((r64(SECRET, secret) + seed) & MASK),
    r64(data, at + 8) ^ ((r64(SECRET, secret + 8) - seed) & MASK),
  );

/** The end of XXH3. */
function avalanche(hash: bigint): bigint {
  const mixed = ((hash ^ (hash >> 37n)) * MX1) & MASK;
  return mixed ^ (mixed >> 32n);
}

/** The end of XXH64. */
function avalanche64(hash: bigint): bigint {
  const first = ((hash ^ (hash >> 33n)) * P64_2) & MASK;
  const second = ((first ^ (first >> 29n)) * P64_3) & MASK;
  return second ^ (second >> 32n);
}

export function xxh3(bytes: Uint8Array, seed: bigint): bigint {
  const length = bytes.length;
  if (length > 240) return XXH3_128(Buffer.from(bytes), seed) & MASK;
  const data = new DataView(bytes.buffer, bytes.byteOffset, length);
  if (length > 16) return long(data, seed);
  const size = BigInt(length);
  if (length > 8) {
    const low = r64(data, 0) ^ (((r64(SECRET, 24) ^ r64(SECRET, 32)) + seed) & MASK);
    const high = r64(data, length - 8) ^ (((r64(SECRET, 40) ^ r64(SECRET, 48)) - seed) & MASK);
    return avalanche((size + swap(low, 8) + high + fold(low, high)) & MASK);
  }
  if (length > 3) {
    const wide = seed ^ (swap(seed & 0xffffffffn, 4) << 32n);
    const flip = ((r64(SECRET, 8) ^ r64(SECRET, 16)) - wide) & MASK;
    let hash = ((r32(data, length - 4) + (r32(data, 0) << 32n)) & MASK) ^ flip;
    hash ^= rotate(hash, 49n) ^ rotate(hash, 24n);
    hash = (hash * MX2) & MASK;
    hash ^= ((hash >> 35n) + size) & MASK;
    hash = (hash * MX2) & MASK;
    return hash ^ (hash >> 28n);
  }
  if (length > 0) {
    const at = (place: number) => BigInt(data.getUint8(place));
    const all = (at(0) << 16n) | (at(length >> 1) << 24n) | at(length - 1) | (size << 8n);
    return avalanche64(all ^ (((r32(SECRET, 0) ^ r32(SECRET, 4)) + seed) & MASK));
  }
  return avalanche64(seed ^ r64(SECRET, 56) ^ r64(SECRET, 64));
}

function swap(value: bigint, bytes: number): bigint {
  let swapped = 0n;
  for (let n = 0; n < bytes; n += 1) swapped |= ((value >> BigInt(8 * n)) & 0xffn) << BigInt(8 * (bytes - 1 - n));
  return swapped;
}

function long(data: DataView, seed: bigint): bigint {
  const length = data.byteLength;
  let sum = (BigInt(length) * P64_1) & MASK;
  if (length <= 128) {
    // From the outside to the middle, sixteen bytes from each end.
    for (let pair = Math.ceil(length / 32) - 1; pair >= 0; pair -= 1) {
      sum += mix(data, 16 * pair, 32 * pair, seed) + mix(data, length - 16 * (pair + 1), 32 * pair + 16, seed);
    }
    return avalanche(sum & MASK);
  }
  for (let n = 0; n < 8; n += 1) sum += mix(data, 16 * n, 16 * n, seed);
  sum = avalanche(sum & MASK);
  for (let n = 8; n < Math.floor(length / 16); n += 1) sum += mix(data, 16 * n, 16 * (n - 8) + 3, seed);
  return avalanche((sum + mix(data, length - 16, 136 - 17, seed)) & MASK);
}
