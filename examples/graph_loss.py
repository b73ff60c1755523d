"""Train a sentence-transformers model with RAMEN's loss, in sentence-transformers' own trainer.

python examples/graph_loss.py --steps 20
python examples/graph_loss.py --model path/or/hub-name --out my-model
"""

import argparse

import datasets
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments

import ramen
from ramen.integrations.sentence_transformers import GraphRegularizedLoss, training_rows

PACKAGES = {
    "mutt": ("text mode mail client", ["mail client", "terminal program"]),
    "thunderbird": ("mail and news client", ["mail client", "graphical program"]),
    "postfix": ("mail transport agent", ["mail server"]),
    "exim": ("mail server with filters", ["mail server"]),
    "vim": ("editor for the terminal", ["text editor", "terminal program"]),
    "gedit": ("simple text editor for the desktop", ["text editor", "graphical program"]),
    "nano": ("small editor", ["text editor", "terminal program"]),
    "nginx": ("web server", ["web server"]),
    "apache": ("HTTP server", ["web server"]),
    "firefox": ("web browser", ["web browser", "graphical program"]),
}
SECTIONS = {
    "mail": ["mutt", "thunderbird", "postfix", "exim"],
    "editors": ["vim", "gedit", "nano"],
    "web": ["nginx", "apache", "firefox"],
}
LABEL_SECTIONS = {
    "mail client": ["mail"],
    "mail server": ["mail"],
    "text editor": ["editors"],
    "web server": ["web"],
    "web browser": ["web"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="graph-loss-model")
    options = parser.parse_args()

    dataset = ramen.load_dataset(
        [text for text, _ in PACKAGES.values()],
        [labels for _, labels in PACKAGES.values()],
        ids=list(PACKAGES),
        graphs={
            "section": {
                "documents": [(name, f"section {section}") for section, names in SECTIONS.items() for name in names],
                "labels": {label: [f"section {name}" for name in names] for label, names in LABEL_SECTIONS.items()},
            }
        },
    )
    rows = datasets.Dataset.from_dict(training_rows(dataset, ramen.build_graph(dataset)))

    model = SentenceTransformer(options.model)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-4,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=rows,
        loss=GraphRegularizedLoss(model),
    )
    trainer.train()
    model.save(options.out)
    print({name: round(value, 1) for name, value in ramen.evaluate(model, dataset).items() if name == "p_at_1"})


if __name__ == "__main__":
    main()
