// Sets the colours before anything is drawn: a plain script, as modules run too late for that.

{
  let choice = null;
  try {
    choice = localStorage.getItem("vkmoe.theme");
  } catch {
    // The browser keeps nothing for this page: it follows the system.
  }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const isDark = choice === "dark" || (choice !== "light" && dark);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}
