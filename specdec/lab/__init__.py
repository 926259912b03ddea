"""What studies a decoder: none of it runs in a call.

Certificates, evaluation and training; traces, tables and inspection; other programs' doors
(`integrations`), the command line (`cli`), and the small trained models (`zoo`). The rooms beside
this folder are the decoder itself.
"""
