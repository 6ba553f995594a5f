"""BERT in Equinox: masked language modelling on real text, with steps that cost what the hardware charges."""
