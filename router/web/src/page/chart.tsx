// uPlot in a box that keeps its width and takes its colours from the style sheet, so that themes reach the canvas.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";

export interface Ink {
  text: string;
  muted: string;
  grid: string;
  accent: string;
  warm: string;
  cool: string;
  bad: string;
  surface: string;
}

/** The theme's colours, read from custom properties. */
export function ink(element: Element): Ink {
  const style = getComputedStyle(element);
  const of = (name: string) => style.getPropertyValue(`--${name}`).trim();
  return {
    text: of("text"),
    muted: of("muted"),
    grid: of("line"),
    accent: of("accent"),
    warm: of("warm"),
    cool: of("cool"),
    bad: of("bad"),
    surface: of("surface"),
  };
}

export interface ChartProps {
  /** What the picture shows, for those who do not see it. */
  label: string;
  height: number;
  data: uPlot.AlignedData;
  /** Options that depend on colours. Asked again when `version` or the theme changes. */
  options: (ink: Ink) => Omit<uPlot.Options, "width" | "height">;
  /** Changes when the options do. */
  version: string;
  theme: string;
}

export function Chart({ label, height, data, options, version, theme }: ChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(data);
  latest.current = data;

  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const width = () => Math.max(240, Math.floor(element.clientWidth));
    const made = new uPlot({ ...options(ink(element)), width: width(), height }, latest.current, element);
    plot.current = made;
    const observer = new ResizeObserver(() => {
      if (Math.abs(made.width - width()) > 1) made.setSize({ width: width(), height });
    });
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [version, theme, height]);

  useEffect(() => {
    if (plot.current && plot.current.data !== data) plot.current.setData(data);
  }, [data]);

  return <div class="chart" role="img" aria-label={label} ref={box} />;
}

/** Axis settings that all our charts share. */
export function axis(ink: Ink, more: uPlot.Axis): uPlot.Axis {
  return {
    stroke: ink.muted,
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    labelSize: 18,
    grid: { stroke: ink.grid, width: 1 },
    ticks: { stroke: ink.grid, width: 1, size: 4 },
    ...more,
  };
}
