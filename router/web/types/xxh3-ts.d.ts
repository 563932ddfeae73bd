// The package ships its sources beside its build, and they do not pass our compiler settings.
export declare function XXH3_128(data: Uint8Array, seed?: bigint): bigint;
