// Work over the vocabulary.
