"""DeepSeek-OCR, DeepSeek-OCR-2 and Unlimited-OCR."""
