"""Text encoders: BERT, RoBERTa, DistilBERT and ELECTRA, with their heads."""
