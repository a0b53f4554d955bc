"""Advantages of groups: rewards, penalties, the choice of groups that tell anything apart."""
