"""Cases of whole trainings, of MeanFlow and of BERT."""
