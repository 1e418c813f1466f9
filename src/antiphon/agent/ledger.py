from antiphon.ledger import EntryTaken, Ledger, RunSummary

__all__ = ["EntryTaken", "Ledger", "RunSummary"]
