// The sliders: every one moves the replay at once.

import { DEFAULTS } from "../oracle/policy.ts";
import { MODEL } from "../oracle/replay.ts";
import { count, number, share } from "./format.ts";
import { SLIDERS, type Slider, type View } from "./state.ts";

/** Where there is room beside the rest; elsewhere settings are folded away at first. */
const WIDE = "(min-width: 1080px)";

export function Controls({ view, change, only }: { view: View; change: (next: Partial<View>) => void; only?: Slider["key"][] }) {
  const sliders = only ? SLIDERS.filter(({ key }) => only.includes(key)) : SLIDERS;
  const moved = SLIDERS.some(({ key }) => valueOf(view, key) !== startOf(key));
  const set = (slider: Slider, value: number) => {
    if (slider.key === "budget") return change({ budget: value });
    const open = slider.openEnded === true && value >= slider.max;
    change({ weights: { ...view.weights, [slider.key]: open ? null : value } });
  };
  return (
    <details class="controls panel" open={matchMedia(WIDE).matches}>
      <summary><h2>Settings{moved && <small> moved</small>}</h2></summary>
      <form aria-label="Settings" onSubmit={(event) => event.preventDefault()}>
      {sliders.map((slider) => {
        const value = valueOf(view, slider.key);
        const shown = spoken(slider, value);
        return (
          <div class="slider" key={slider.key}>
            <label for={`s-${slider.key}`} title={slider.help}>{slider.label}</label>
            <output for={`s-${slider.key}`}>{shown}</output>
            <input
              id={`s-${slider.key}`}
              type="range"
              min={0}
              max={slider.max}
              step={slider.step}
              value={value ?? slider.max}
              aria-valuetext={`${shown} ${slider.unit}`}
              aria-describedby={`u-${slider.key}`}
              onInput={(event) => set(slider, Number(event.currentTarget.value))}
            />
            <small id={`u-${slider.key}`}>{slider.unit}</small>
          </div>
        );
      })}
      <p class="note">
        Weights count for <span class="mono">cache-plus-load</span>, the first also for <span class="mono">kv-aware</span>.{" "}
        {only ? "Untouched, the recorded ones count." : "Budget, cap and reserve count for all."}
      </p>
      <button type="button" disabled={!moved} onClick={() => change({ weights: DEFAULTS, budget: MODEL.budget_ticks })}>Reset</button>
      </form>
    </details>
  );
}

const valueOf = (view: View, key: Slider["key"]): number | null => (key === "budget" ? view.budget : view.weights[key]);
const startOf = (key: Slider["key"]): number | null => (key === "budget" ? MODEL.budget_ticks : DEFAULTS[key]);

function spoken(slider: Slider, value: number | null): string {
  if (value === null) return "no cap";
  if (slider.key === "coldReserve") return share(value);
  if (slider.key === "budget") return `${count(value)}`;
  return number(value) === "0" && value > 0 ? String(value) : String(value);
}
