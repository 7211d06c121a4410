"""Training a drafter for a model on the model's own answers, with torch. Nothing else in the package needs it."""
