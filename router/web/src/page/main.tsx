// Starts the page on its source: a lab that kv-router serves, a lab in a file, or a live router.

import "uplot/dist/uPlot.min.css";
import "./style.css";

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Explorer } from "./explorer.tsx";
import { Lab, type Start } from "./lab.tsx";

type Source = { kind: "lab"; start: Start } | { kind: "live" } | { kind: "broken"; why: string };

async function source(): Promise<Source> {
  const kind = document.documentElement.dataset["source"];
  if (kind === "live") return { kind: "live" };
  const inline = document.getElementById("start")?.textContent;
  try {
    if (inline) return { kind: "lab", start: { ...(JSON.parse(inline) as Start), served: false } };
    const answer = await fetch("lab.json");
    if (!answer.ok) throw new Error(`kv-router answered ${answer.status}`);
    return { kind: "lab", start: { ...((await answer.json()) as Start), served: true } };
  } catch (error) {
    return { kind: "broken", why: error instanceof Error ? error.message : String(error) };
  }
}

const THEMES = ["system", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];

function remembered(): Theme {
  try {
    return THEMES.find((one) => one === localStorage.getItem("kvrouter-theme")) ?? "system";
  } catch {
    return "system";
  }
}

/** The theme in force, `light` or `dark`, and a way to choose. */
function useTheme(): [string, Theme, (theme: Theme) => void] {
  const [theme, setTheme] = useState<Theme>(remembered);
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(query.matches);
  useEffect(() => {
    const follow = () => setDark(query.matches);
    query.addEventListener("change", follow);
    return () => query.removeEventListener("change", follow);
  }, []);
  document.documentElement.dataset["theme"] = theme;
  const choose = (next: Theme) => {
    setTheme(next);
    try {
      localStorage.setItem("kvrouter-theme", next);
    } catch {
      // A page from disk may have no storage; the choice lasts until it is closed.
    }
  };
  return [theme === "system" ? (dark ? "dark" : "light") : theme, theme, choose];
}

function Page({ from }: { from: Source }) {
  const [theme, chosen, choose] = useTheme();
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => {
        event.preventDefault();
        document.getElementById("main")?.focus();
      }}>Skip to the content</a>
      <header class="top row">
        <h1><span class="logo" aria-hidden="true" />kvrouter <span>{from.kind === "live" ? "explorer" : "lab"}</span></h1>
        <label class="push theme">
          <span class="visually-hidden">Theme</span>
          <select value={chosen} onChange={(event) => choose(event.currentTarget.value as Theme)}>
            {THEMES.map((one) => <option key={one} value={one}>{`${one} theme`}</option>)}
          </select>
        </label>
      </header>
      <main id="main" tabIndex={-1}>
        {from.kind === "lab" && <Lab start={from.start} theme={theme} />}
        {from.kind === "live" && <Explorer theme={theme} />}
        {from.kind === "broken" && <p class="problem" role="alert"><span>{`The trace could not be loaded: ${from.why}. Is kv-router still running?`}</span></p>}
      </main>
    </>
  );
}

const root = document.getElementById("page");
if (root) void source().then((from) => {
  document.title = from.kind === "live" ? "kvrouter explorer" : "kvrouter lab";
  render(<Page from={from} />, root);
});
