// Light or dark: as the system has it, until someone chooses otherwise here.

import { forgetTheme } from "./colours.js";

const NAME = "twostroke-theme";
const CHOICES = ["auto", "light", "dark"];

function saved() {
  try {
    const choice = localStorage.getItem(NAME);
    return CHOICES.includes(choice) ? choice : "auto";
  } catch {
    return "auto";
  }
}

function apply(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  forgetTheme();
}

function applySavedTheme() {
  apply(saved());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forgetTheme);
}

function chooseTheme(choice) {
  apply(choice);
  try {
    localStorage.setItem(NAME, choice);
  } catch {
    return; // then it holds for this visit
  }
}

export { CHOICES, applySavedTheme, chooseTheme, saved };
