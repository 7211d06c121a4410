// Prompts for the playground's situations: long ones of a wanted length, new ones and the same ones again.

const SUBJECTS = [
  "The lighthouse keeper",
  "A young botanist",
  "The night train",
  "An old cartographer",
  "The harbour pilot",
  "A patient clockmaker",
  "The village baker",
  "A travelling printer",
  "The river surveyor",
  "A quiet archivist",
];
const VERBS = [
  "recorded",
  "repaired",
  "carried",
  "measured",
  "described",
  "collected",
  "traded",
  "followed",
  "painted",
  "counted",
];
const OBJECTS = [
  "the tides of the northern bay",
  "seven brass instruments",
  "letters from three islands",
  "a map of the marshes",
  "the songs of the ferrymen",
  "samples of red clay",
  "the price of salt and barley",
  "the hours of the winter sun",
];
const WHEN = [
  "before the first snow",
  "during the long drought",
  "in the year of the comet",
  "after the harvest fair",
  "while the bridge was closed",
  "on the last day of spring",
];
const TOKENS_A_SENTENCE = 16; // about, for most tokenizers

/** Always the same text for the same number. */
function story(number, tokens) {
  const sentences = [];
  let state = (number * 2654435761) >>> 0 || 1;
  const pick = (words) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return words[Math.floor((state / 2 ** 32) * words.length)];
  };
  for (let count = 0; count < tokens / TOKENS_A_SENTENCE; count += 1) {
    sentences.push(`${pick(SUBJECTS)} ${pick(VERBS)} ${pick(OBJECTS)} ${pick(WHEN)}.`);
  }
  return sentences.join(" ");
}

/** A number that no text of this page has begun with yet. */
function fresh() {
  return Math.floor(Math.random() * 1e9);
}

function longPrompt(number, tokens) {
  return `Report ${number}. ${story(number, tokens)}\n\nIn one sentence: what is this report about?`;
}

const QUESTIONS = [
  "Why is the sky blue?",
  "How does bread rise?",
  "What is a prime number?",
  "Why do leaves turn red?",
  "How do bees find flowers?",
  "What makes a rainbow?",
  "Why is the sea salty?",
  "How does a lock on a canal work?",
  "What is an echo?",
  "Why do we dream?",
];

/** What is copied can be guessed from the prompt: most drafts hold. Small models go on where they see it twice. */
function copyPrompt(number, tokens) {
  const text = story(number, tokens);
  return `Copy the following paragraph exactly as it is.\n\n${text}\n\n${text}`;
}

export { QUESTIONS, copyPrompt, fresh, longPrompt, story };
