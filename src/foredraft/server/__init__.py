"""The OpenAI API over an engine: `app.make_app` puts it together."""
