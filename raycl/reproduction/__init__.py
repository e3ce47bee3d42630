"""The field's claims reproduced: a figure, its numbers, and a sentence that says what held here."""
