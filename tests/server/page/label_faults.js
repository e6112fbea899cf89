// Elements without a name, references to nothing, and ids used twice.
() => {
  const faults = [];
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  ids.filter((id, i) => ids.indexOf(id) !== i).forEach((id) => faults.push(`two elements #${id}`));
  for (const node of document.querySelectorAll("input, textarea, select, button, [role=region]")) {
    const labels = [...(node.labels ?? [])].map((label) => label.textContent.trim());
    const own = node.localName === "button" ? node.textContent.trim() : "";
    if (!labels.join("") && !own && !node.ariaLabel) faults.push(`${node.outerHTML} has no name`);
  }
  for (const name of ["aria-describedby", "aria-labelledby", "for"])
    for (const node of document.querySelectorAll(`[${name}]`))
      if (!document.getElementById(node.getAttribute(name))) faults.push(`${node.outerHTML} points nowhere`);
  if (!document.documentElement.lang) faults.push("no language");
  if (document.querySelectorAll("h1").length !== 1) faults.push("not one h1");
  return faults;
}
