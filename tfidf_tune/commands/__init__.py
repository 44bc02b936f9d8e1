"""The commands of ``tfidf-tune`` beside torchtune's own: a module each, with ``main(arguments)``."""
