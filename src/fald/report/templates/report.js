"use strict";
const choices = document.querySelectorAll("button[data-figure]");
for (const button of choices) {
  button.addEventListener("click", () => {
    for (const other of choices) {
      other.setAttribute("aria-pressed", String(other === button));
      document.getElementById(other.dataset.figure).hidden = other !== button;
    }
  });
}

// paper shows what is folded away on the screen
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
