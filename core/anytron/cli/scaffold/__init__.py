"""Write the package of a new platform from the template that lies beside this file.

``template/`` is a complete package for a platform called ``acme``, of real files: its name is replaced in them.
"""
