"""A small student of a model of Hugging Face's library: its first layers, without dropout.

    python benchmarks/student.py --model FOLDER --output FOLDER [--layers 1]

The model must be a BERT with its fast tokenizer, such as all-MiniLM-L6-v2. ``encoder.name=transformers:FOLDER``
trains the student, and ``benchmarks/teacher.py`` computes the embeddings that teach it.
"""

from pathlib import Path

from measuring import make_parser
from transformers import AutoModel, AutoTokenizer


def main() -> None:
    options = make_parser(__doc__, reports=False, model=Path, output=Path, layers=1).parse_args()
    model = AutoModel.from_pretrained(options.model)
    model.encoder.layer = model.encoder.layer[: options.layers]
    model.config.num_hidden_layers = len(model.encoder.layer)
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    model.save_pretrained(options.output)
    AutoTokenizer.from_pretrained(options.model).save_pretrained(options.output)


if __name__ == "__main__":
    main()
