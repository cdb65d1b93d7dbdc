"""Model families: what each must offer (spec, language_model), and the decoder."""
