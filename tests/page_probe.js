// Appended to a page in a frame: what a reader would stumble over goes into the title, as JSON.
const faults = [];
const close = 1; // pixels by which boxes may differ where nothing is wrong
const screenWidth = document.documentElement.clientWidth;
const tell = (what, element) => faults.push(`${what}: ${element.textContent.trim().slice(0, 60)}`);

if (document.documentElement.scrollWidth > screenWidth)
  faults.push(`the page is ${document.documentElement.scrollWidth} wide, the screen ${screenWidth}`);

// text that leaves the section it is in, or its own box where that is clipped
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const node = texts.currentNode, holder = node.parentElement;
  if (!node.textContent.trim() || holder.closest("style, script, title")) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  const frame = (holder.closest("section") ?? document.body).getBoundingClientRect();
  for (const box of range.getClientRects()) {
    if (box.left < frame.left - close || box.right > frame.right + close) tell("outside", holder);
    if (box.width && box.height < 7) tell("too small to read", holder);
  }
  // a part of a slug is one text node: on two lines, it is broken within a word
  if (holder.tagName === "CODE" && range.getClientRects().length > 1) tell("broken", node);
}
for (const element of document.querySelectorAll("body *")) {
  const style = getComputedStyle(element);
  const clipped = style.overflowX !== "visible" && element.scrollWidth > element.clientWidth + close;
  if (clipped && !(element instanceof SVGElement)) tell("cut off", element);
}

// figures that leave their column
for (const bar of document.querySelectorAll(".bar > :last-child"))
  if (bar.scrollWidth > bar.clientWidth + close) tell("too wide for its column", bar);

// marks of one axis that lie over each other
for (const axis of document.querySelectorAll(".axis .line, svg")) {
  const marks = [...axis.querySelectorAll(".tick, text")].map((mark) => mark.getBoundingClientRect());
  marks.forEach((a, i) => marks.slice(i + 1).forEach((b) => {
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const up = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > close && up > 4 * close) tell(`marks overlap by ${across} x ${up}`, axis);
  }));
}
parent.document.title = JSON.stringify({ screenWidth, faults: [...new Set(faults)].slice(0, 20) });
