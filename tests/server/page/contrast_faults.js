// What is fainter than WCAG 2.2 AA allows: text 4.5 : 1; edges of controls and marks of origins 3 : 1.
() => {
  const faults = [];
  const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
  const isOpaque = (colour) => (channels(colour)[3] ?? 1) === 1;
  const luminance = (colour) => {
    const [r, g, b] = channels(colour).slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (isOpaque(colour)) return colour;
    }
    throw new Error("no background");
  };
  const check = (what, colour, behind, least) => {
    if (!isOpaque(colour)) faults.push(`${what}: ${colour} is not opaque`);
    const [a, b] = [luminance(colour), luminance(behind)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (!(ratio >= least)) faults.push(`${what}: ${colour} on ${behind} is ${ratio.toFixed(2)}`);
  };
  let numTexts = 0;
  for (const node of document.body.querySelectorAll("*")) {
    if (!node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (hasText) {
      numTexts += 1;
      check(node.textContent.trim(), style.color, ground(node), 4.5);
    }
    if (node.matches("input, textarea, button")) check(node.outerHTML, style.borderTopColor, ground(node.parentElement), 3);
    if (node.matches("textarea")) check("placeholder", getComputedStyle(node, "::placeholder").color, ground(node), 4.5);
    if (node.matches(".shares > :not(.by-0)")) check(node.className, style.backgroundColor, ground(document.body), 3);
    if (node.matches(".token:not(.by-0)")) {
      const mark = style.boxShadow.match(/rgba?\([^)]*\)/)[0];
      check(`mark of ${node.className}`, mark, ground(document.body), 3);
    }
  }
  return [numTexts, faults];
}
