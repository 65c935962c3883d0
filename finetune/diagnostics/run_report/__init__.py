"""`finetune report`: pages and pictures of runs. `charts` says what is drawn, `page` what is written around it."""
