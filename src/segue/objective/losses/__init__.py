"""Losses: functions of tensors."""
