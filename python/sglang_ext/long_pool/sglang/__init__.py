"""Long prefills over several instances, inside SGLang's scheduler."""
