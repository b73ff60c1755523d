from retriever_fixtures import artifacts, encoder_folder, track

__all__ = ["artifacts", "encoder_folder", "track"]
