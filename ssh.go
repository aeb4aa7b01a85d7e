package knoc
