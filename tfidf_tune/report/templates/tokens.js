"use strict";
// Shows the numbers of the token that is pointed at or focused, and colors the tokens for the chosen TF form.
{
  const details = document.getElementById("details");
  const tokens = Array.from(document.querySelectorAll(".tokens span"));
  const showDetails = (event) => {
    if (event.target.dataset.details) details.textContent = event.target.dataset.details;
  };
  for (const block of document.querySelectorAll(".tokens")) {
    block.addEventListener("pointerover", showDetails);
    block.addEventListener("focusin", showDetails);
    block.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const next = step && tokens[tokens.indexOf(event.target) + step];
      if (!next) return;
      event.preventDefault();
      next.focus();
    });
  }
  for (const choice of document.querySelectorAll("input[name=form]")) {
    choice.addEventListener("change", () => {
      for (const token of tokens) token.className = token.dataset[choice.value];
    });
  }
}
