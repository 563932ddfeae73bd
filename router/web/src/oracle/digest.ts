// Digests: SHA-256 names ledgers, XXH3-128 names namespaces. Both in plain JavaScript: WebCrypto is missing where
// a page is neither on localhost nor https, and WebAssembly would need a weaker Content-Security-Policy.

import { sha256 } from "@noble/hashes/sha2.js";
import { Buffer } from "buffer";
import { XXH3_128 } from "xxh3-ts/xxh3.js";

const utf8 = new TextEncoder();

/** SHA-256 of the text's UTF-8, as 64 hexadecimal digits. */
export function digest(text: string): string {
  return hex(sha256(utf8.encode(text)));
}

/** Digest of a namespace's parts, each framed by its length, as 32 hexadecimal digits. */
export function namespaceDigest(parts: string[]): string {
  const framed: number[] = [];
  for (const part of parts) {
    const bytes = utf8.encode(part);
    const length = new DataView(new ArrayBuffer(8));
    length.setBigUint64(0, BigInt(bytes.length), true);
    framed.push(...new Uint8Array(length.buffer), ...bytes);
  }
  return XXH3_128(Buffer.from(framed)).toString(16).padStart(32, "0");
}

/** SHA-256 in base64, as a Content-Security-Policy spells it. */
export function hex(bytes: Uint8Array): string {
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
