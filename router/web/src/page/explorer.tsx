// Placeholder until the live view stands.
export function Explorer({ theme }: { theme: string }) {
  return <p>{theme}</p>;
}
