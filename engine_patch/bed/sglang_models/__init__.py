"""SGLang's own model classes, whose `load_weights` embeds a small pair in a wide one.

    SGLANG_EXTERNAL_MODEL_PACKAGE=ddtree_engine.bed.sglang_models sglang serve --model-path BED/target ...

They keep the names of SGLang's classes, because SGLang decides by architecture how a model is cached and run:
a server on a bed must differ from a server on the real checkpoint in nothing but its numbers. Folders without
`ddtree_bed` in their config load as ever.
"""
