"""The look of a report's page: one style sheet, light and dark by the reader's own setting, and for paper."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f5f2; --card: #ffffff; --ink: #1d2126; --soft: #5a626c; --line: #e2e0da; --track: #edebe5;
  --after: #0b6e62; --after-ink: #ffffff; --before: #66717d; --peer: #a8743a; --good: #0b6e62; --bad: #b3261e;
  --warn: #8a5a00; --wash: #e4f1ee; --wash-bad: #fbe9e7; --under: #0b6e6210; --code: #f1efea; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171a; --card: #1c2024; --ink: #e8eaed; --soft: #a3abb5; --line: #30363c; --track: #2a2f35;
  --after: #4fc9b4; --after-ink: #06231e; --before: #8c97a4; --peer: #d9a066; --good: #4fc9b4; --bad: #ff8a80;
  --warn: #f2c063; --wash: #173430; --wash-bad: #3b1f1d; --under: #4fc9b412; --code: #23282d; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main, header, footer { max-width: 1080px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 44px; padding-bottom: 8px; }
.kicker { margin: 0; color: var(--soft); font-size: 13px; letter-spacing: .08em; text-transform: uppercase; }
h1 { margin: 6px 0 4px; font-size: 34px; line-height: 1.2; letter-spacing: -.01em; overflow-wrap: anywhere; }
.lead { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 18px 0 0; padding: 0; list-style: none;
  font-size: 14px; }
a { color: var(--good); text-underline-offset: 3px; }
a:focus-visible, summary:focus-visible, [tabindex]:focus-visible { outline: 3px solid var(--good); outline-offset: 2px;
  border-radius: 3px; }
section { margin: 20px 0; padding: 24px 26px 26px; background: var(--card); border: 1px solid var(--line);
  border-radius: 14px; }
h2 { margin: 0 0 2px; font-size: 20px; letter-spacing: -.005em; }
h3 { margin: 0 0 10px; font-size: 15px; }
.say { margin: 0 0 16px; color: var(--soft); font-size: 14px; max-width: 76ch; } .say:last-child { margin-bottom: 0; }
h2 + .scroll, h2 + .facts { margin-top: 10px; } pre + h3 { margin-top: 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); gap: 14px; margin: 22px 0 0;
  padding: 0; }
.tile { padding: 16px 18px 14px; background: var(--card); border: 1px solid var(--line); border-radius: 14px; }
.tile dt { color: var(--soft); font-size: 13px; }
.tile dd { margin: 0; }
.tile .figure { font-size: 30px; font-weight: 650; line-height: 1.25; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.tile .detail { color: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
.good { color: var(--good); } .bad { color: var(--bad); } .unclear { color: var(--warn); }
.scroll { position: relative; overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th { padding: 6px 14px 6px 0; text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px;
  border-bottom: 1px solid var(--line); white-space: nowrap; vertical-align: bottom; }
td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child > td, tr:last-child > th[scope=row] { border-bottom: 0; }
th[scope=row] { color: var(--ink); font-size: 14px; white-space: normal; vertical-align: top; }
th[scope=row]:has(.path) { min-width: 200px; font-weight: 400; }
.number { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
.wide { width: 30%; min-width: 120px; }
code, pre, .path { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  font-size: 13px; }
.path { overflow-wrap: anywhere; } .paths { margin: 0; padding: 0; list-style: none; }
pre { margin: 0; padding: 14px 16px; overflow-x: auto; background: var(--code); border-radius: 9px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.bar { display: block; width: 100%; height: 14px; background: var(--track); border-radius: 3px; }
td .bar { margin-top: 4px; }
.fill-before { fill: var(--before); } .fill-after, .fill-ours { fill: var(--after); } .fill-peer { fill: var(--peer); }
.fill-other { fill: var(--before); } .fill-bad { fill: var(--bad); }
.whisker { stroke: var(--ink); stroke-width: 1.5; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 14px 40px; }
.sides > div { min-width: 0; }
.kernels { margin: 0; padding: 0; list-style: none; }
.kernels li { margin: 0 0 9px; }
.kernels .row { display: flex; justify-content: space-between; gap: 14px; font-size: 13px; }
.kernels .name { min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; font-size: 12.5px; }
.kernels .much { flex: none; color: var(--soft); font-variant-numeric: tabular-nums; }
.kernels .bar { height: 8px; }
.tag { display: inline-block; padding: 0 7px; border-radius: 99px; background: var(--wash); color: var(--good);
  font: 600 11.5px/18px system-ui, sans-serif; white-space: nowrap; }
.tag.no { background: var(--wash-bad); color: var(--bad); }
.roofline { display: block; width: 100%; min-width: 620px; height: auto; }
.roofline .grid { stroke: var(--line); } .roofline .tick { fill: var(--soft); font-size: 12px; }
.roofline .under { fill: var(--under); } .roofline .roof { fill: none; stroke: var(--ink); stroke-width: 2; }
.roofline .roof-name { fill: var(--ink); font-size: 12.5px; font-weight: 600; }
.roofline .point text { font-size: 11.5px; font-weight: 700; pointer-events: none; }
.roofline .after circle, .roofline .after rect { fill: var(--after); stroke: var(--card); stroke-width: 1.5; }
.roofline .after.other rect { fill: var(--before); } .roofline .after text { fill: var(--after-ink); }
.roofline .after.other text { fill: var(--card); }
.roofline .before circle, .roofline .before rect { fill: var(--card); stroke: var(--before); stroke-width: 1.75; }
.roofline .before text { fill: var(--soft); }
.key { display: flex; flex-wrap: wrap; gap: 2px 22px; margin: 8px 0 14px; padding: 0; list-style: none;
  color: var(--soft); font-size: 13px; }
.key svg { width: 14px; height: 14px; margin-right: 6px; vertical-align: -2px; overflow: visible; }
.key .solid { fill: var(--after); } .key .gray { fill: var(--before); }
.key .hollow { fill: var(--card); stroke: var(--before); stroke-width: 1.75; }
details { margin-top: 12px; } summary { cursor: pointer; font-size: 14px; color: var(--good); }
.paths + details { margin-top: 2px; } .paths + details > summary { font-size: 13px; }
.paths + details > .paths { margin-top: 2px; }
details > :not(summary) { margin-top: 10px; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 4px 24px; margin: 0; font-size: 14px; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.notes { margin: 0; padding-left: 20px; font-size: 14px; }
footer { padding-top: 4px; padding-bottom: 44px; color: var(--soft); font-size: 13px; }
@media (max-width: 640px) { main, header, footer { padding-left: 14px; padding-right: 14px; }
  section { padding: 18px 16px; } h1 { font-size: 26px; } .facts { grid-template-columns: 1fr; gap: 0; }
  .facts dd { margin-bottom: 8px; } .tiles { grid-template-columns: 1fr 1fr; } .tile .figure { font-size: 24px; } }
@media print { body { background: none; } section, .tile { break-inside: avoid; } nav { display: none; } }
"""
