"""What the plugins of inference engines share: settings, versions, checks of models and layers, and connections."""
