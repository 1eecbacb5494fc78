"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const options = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };

for (const place of document.querySelectorAll(".plot")) {
  const figure = figures[place.id];
  Plotly.newPlot(place, figure.data, figure.layout, options);
}

const choices = document.querySelectorAll("button[data-figure]");
for (const button of choices) {
  button.addEventListener("click", () => {
    const figure = figures[button.dataset.figure];
    Plotly.react("forest", figure.data, figure.layout, options);
    for (const other of choices) other.setAttribute("aria-pressed", String(other === button));
  });
}

// paper shows what is folded away on the screen
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
