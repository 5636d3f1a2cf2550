"""The pair leaves outputs and losses on the devices that compute them; the engine never
uses it.
"""
