"""Keeps outputs within what their requests ask for: `compiler` makes a request's matcher, `masks` runs them all."""

from services.engine.grammars.compiler import GrammarCompiler, GrammarFault
from services.engine.grammars.masks import MaskFiller, TokenMasks
from services.engine.grammars.matcher import GrammarMatcher
from services.engine.grammars.pending import PendingGrammars

__all__ = ["GrammarCompiler", "GrammarFault", "GrammarMatcher", "MaskFiller", "PendingGrammars", "TokenMasks"]
