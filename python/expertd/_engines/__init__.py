"""What inference engines and transformers share: settings, versions, checks of models and layers, and connections."""
